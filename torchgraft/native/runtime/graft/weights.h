// Weights: what a package says of them, and its tensors.
#pragma once

#include "graft/archive.h"
#include "graft/plan.h"

namespace torchgraft {

// The tensors of a safetensors file in memory, as views of it; `owner` keeps it there.
std::map<std::string, at::Tensor> read_tensors(
    std::string_view data, const std::shared_ptr<Archive>& owner);

// An entry of `weights`.
struct Weight {
  std::string name, kind, tensor, device;
  at::ScalarType dtype;
  std::vector<int64_t> shape, stride;
  bool saved, made;

  explicit Weight(const json& data);

  // The same for weights that are one tensor on one device.
  std::string place() const;

  // A tensor laid out as this weight, on its device; itself where it is so already.
  at::Tensor like(const at::Tensor& given, const Place& place) const;
};

// Raises `WeightMismatch`, with everything that is wrong, where a state dict does not fit.
void check_weights(const std::vector<Weight>& weights, const Weights& given);

}  // namespace torchgraft
