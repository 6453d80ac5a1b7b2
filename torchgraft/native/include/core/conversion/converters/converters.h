// Converters in C++: one call of an operator becomes layers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/conversion/conversion.h"

namespace torch_aie::core {

// Holds what was registered, and takes it back when it goes: a library that is closed leaves
// nothing behind.
class Registration {
 public:
  Registration() = default;
  Registration(Registration&& other) noexcept : ids_(std::move(other.ids_)) { other.ids_.clear(); }
  Registration& operator=(Registration&& other) noexcept;
  ~Registration();

 protected:
  // `subgraph`: the text is a pattern in TorchScript IR, not a schema.
  void add(std::string text, conversion::OpConverter converter, bool subgraph, const void* caller);

 private:
  std::vector<int64_t> ids_;
};

namespace conversion::converters {

class RegisterNodeConverters : public Registration {
 public:
  // `schema` names an operator: of its text, the name and the overload count. What is registered
  // later is asked first. A converter that returns false, or throws, refuses this one call.
  RegisterNodeConverters&& pattern(const std::string& schema, OpConverter converter) &&;
};

// A weight, as the helpers of converters pass it.
struct Weights {
  Weights() = default;
  Weights(ConversionCtx* ctx, at::Tensor tensor);
  AscendIE::WeightsBuf data;
  AscendIE::Dims shape;
  AscendIE::Dims kernel_shape;  // all but the first two sizes
  int64_t num_input_maps = 0, num_output_maps = 0;
};

// The tensor with sizes of 1 added until it has `dims` of them: behind, or in front.
AscendIE::Tensor* addPadding(
    ConversionCtx* ctx, const torch::jit::Node* n, AscendIE::Tensor* tensor, int64_t dims,
    bool trailing = true);
// The tensor with sizes of 1 taken away until `dims` are left.
AscendIE::Tensor* addUnpadding(
    ConversionCtx* ctx, const torch::jit::Node* n, AscendIE::Tensor* tensor, int64_t dims,
    bool trailing = true);

}  // namespace conversion::converters
}  // namespace torch_aie::core
