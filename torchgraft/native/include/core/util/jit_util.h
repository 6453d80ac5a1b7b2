// Small helpers for converters.
#pragma once

#include <string>
#include <vector>

#include <torch/script.h>

#include "ascendie.h"

namespace torch_aie::core::util {

// A node in one line: its results, its operator, its inputs.
std::string nodeInfo(const torch::jit::Node* n);

AscendIE::Dims toDims(c10::IntArrayRef sizes);
std::vector<int64_t> toVec(const AscendIE::Dims& dims);
// Sizes with `value` put in at a position; a negative one counts from the end.
AscendIE::Dims unsqueezeDims(const AscendIE::Dims& dims, int64_t position, int64_t value = 1);
// Sizes without the one at a position.
AscendIE::Dims squeezeDims(const AscendIE::Dims& dims, int64_t position);

}  // namespace torch_aie::core::util
