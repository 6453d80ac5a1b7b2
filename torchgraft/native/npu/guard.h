// Generators, storages and tensors of the device, as its kernels use them.
#pragma once

#include "device.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <optional>

namespace graft::npu {

// A seed and a count. Each operator that draws numbers takes the next count when it is called, so
// what it draws does not depend on when its stream runs it.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  uint64_t draw();  // a seed for one operator

 private:
  Generator* clone_impl() const override;
  mutable std::mutex lock_;
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

uint64_t draw_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device);

// Gives a storage another size. What it holds is kept, as far as there is room, in stream order.
void resize(c10::StorageImpl* storage, size_t bytes);
void resize(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

// A tensor with the layout of `tensor` over another storage. The keys say on which device.
at::Tensor over(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKeySet keys);

// The same tensors for somebody else: for kernels of the CPU, over the memory of the device, or
// without memory. Tensors that share storage still do.
class Twins {
 public:
  explicit Twins(c10::DeviceType device) : device_(device) {}
  at::Tensor operator()(const at::Tensor& tensor);
  // The tensor of the npu whose storage this one is over, if there is one.
  const at::Tensor* original(const at::Tensor& twin) const;

 private:
  struct Pair {
    c10::Storage twin;
    at::Tensor original;
  };
  c10::DeviceType device_;
  std::map<c10::StorageImpl*, Pair> known_;
};

inline bool is_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

}  // namespace graft::npu
