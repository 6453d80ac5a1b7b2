// Passes in C++: a subgraph, written in TorchScript IR, becomes layers.
#pragma once

#include "core/conversion/converters/converters.h"

namespace torch_aie::core::custom_pass {

class RegisterSubgraphConverters : public Registration {
 public:
  // The converter's arguments are the inputs of the pattern, in order; its node has the pattern's
  // inputs and outputs. Returning false, or throwing, leaves that match as it is.
  RegisterSubgraphConverters&& pattern(
      const std::string& graph, conversion::OpConverter converter) &&;
};

}  // namespace torch_aie::core::custom_pass
