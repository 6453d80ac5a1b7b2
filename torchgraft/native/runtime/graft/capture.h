// A program of a gear as one CUDA graph for each shape of its inputs.
#pragma once

#include <set>

#include "graft/link.h"

namespace torchgraft {

// What a package says of a program's inputs and outputs.
struct Edge {
  std::set<size_t> fixed;    // inputs that keep their address: the states
  std::set<size_t> written;  // inputs that it writes to
  bool alias_outputs = false;  // outputs are the graph's own, good until the next call
};

// Whether this was built with CUDA's headers.
bool captures();

// The program, captured at the first call of a shape and replayed. Where that cannot be, it runs as it
// is, and `refused` is told why, once.
std::shared_ptr<Linked> captured(
    std::shared_ptr<Linked> program, c10::Device device, Edge edge,
    std::function<void(const std::string&)> refused);

}  // namespace torchgraft
