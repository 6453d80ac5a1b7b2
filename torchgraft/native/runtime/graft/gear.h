// What a package has for one declared shape.
#pragma once

#include "graft/capture.h"
#include "graft/link.h"
#include "graft/signature.h"

namespace torchgraft {

// An output that is an input or a view of one, and the program that makes it from the inputs.
struct View {
  size_t output, input, program;
};

// An entry of `gears`: a program for one declared shape, and how it is called.
struct Gear {
  Signature signature;
  std::vector<std::string> states;
  size_t program;
  Edge edge;
  std::vector<View> views;

  Gear(const json& data, const Place& place, const std::vector<Part>& parts);
};

}  // namespace torchgraft
