// Operators that must know the device: making, viewing, resizing and copying tensors.
#include "guard.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace graft::npu {

using at::IntArrayRef;
using at::Tensor;

// --- storages and twins ------------------------------------------------------------------------

void resize(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "this storage cannot be resized");
  c10::DeviceGuard guard(storage->device());
  c10::DataPtr made = device_allocator()->allocate(bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept) device_allocator()->copy_data(made.get(), storage->data_ptr().get(), kept);
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}

void resize(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.dtype().itemsize(),
                                                  tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) resize(tensor.storage().unsafeGetStorageImpl(), bytes);
  impl->set_sizes_and_strides(sizes, strides);
}

Tensor over(const Tensor& tensor, c10::Storage storage, c10::DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

Tensor Twins::operator()(const Tensor& tensor) {
  auto key = device_ == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto it = known_.find(storage);
  if (it == known_.end()) {
    size_t bytes = storage->nbytes();
    bool host = device_ == c10::kCPU;
    void* at = host ? shadow(storage->data_ptr().get(), bytes) : nullptr;
    c10::Storage twin(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(at, device_),
                      c10::GetAllocator(device_), /*resizable=*/!host);
    it = known_.emplace(storage, Pair{std::move(twin), tensor}).first;
  }
  return over(tensor, it->second.twin, c10::DispatchKeySet(key));
}

const Tensor* Twins::original(const Tensor& twin) const {
  auto* wanted = twin.has_storage() ? twin.storage().unsafeGetStorageImpl() : nullptr;
  for (const auto& [storage, pair] : known_) {
    if (pair.twin.unsafeGetStorageImpl() == wanted) return &pair.original;
  }
  return nullptr;
}

namespace {

// --- making ------------------------------------------------------------------------------------

c10::Device device_or_current(std::optional<c10::Device> device) {
  c10::Device wanted = device.value_or(c10::Device(kNpu));
  return wanted.has_index() ? wanted : c10::Device(kNpu, current_device());
}

void check_kind(std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == c10::kStrided,
                              "the simulated npu has strided tensors only");
  TORCH_CHECK(!pin || !*pin, "only tensors of the CPU can be pinned");
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<c10::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  check_kind(layout, pin);
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                     std::optional<bool> pin) {
  check_kind(layout, pin);
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// --- resizing ----------------------------------------------------------------------------------

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != size) {
    std::vector<int64_t> strides(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= std::max<int64_t>(size[i], 1)) strides[i] = step;
    resize(self, size, strides);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage_sizes(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size,
                          IntArrayRef stride) {
  std::vector<int64_t> dense;
  if (stride.data() == nullptr) {
    dense.resize(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= std::max<int64_t>(size[i], 1)) dense[i] = step;
    stride = dense;
  }
  TORCH_CHECK(source.device_type() == kNpu, "a tensor of the npu cannot take a storage of ",
              source.device());
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  resize(self, size, stride);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t count = source.nbytes() / self.dtype().itemsize();
  return set_storage_sizes(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_sizes(self, source.storage(), source.storage_offset(), source.sizes(),
                           source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return set_storage_sizes(self, std::move(none), 0, {0}, {1});
}

// --- copying -----------------------------------------------------------------------------------

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.is_same(to) || to.numel() == 0) return to;
  c10::Device device = is_npu(to) ? to.device() : from.device();
  c10::Stream stream = current_stream(device.index());
  auto of = [](const Tensor& tensor) { return Twins(c10::kCPU)(tensor); };

  Tensor source = is_npu(from) ? of(from) : from.detach();
  Tensor target = is_npu(to) ? of(to) : to.detach();
  bool between = is_npu(from) && is_npu(to);
  const Tensor& host = is_npu(from) ? to : from;
  bool pinned = !between && host.has_storage() && is_pinned(host.storage().data());
  // From memory that is not pinned the bytes are taken now; to it they are waited for.
  bool wait = !between && !(non_blocking && (pinned || is_npu(to)));
  if (!between && is_npu(to) && !wait && !pinned) source = source.clone();

  if (between && from.device() != to.device()) {
    block(stream, record(current_stream(from.device().index())));
  }
  queue_of(stream).push("copy", [source, target] {
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  });
  if (between && from.device() != to.device()) {
    block(current_stream(from.device().index()), record(stream));
  }
  if (wait) synchronize(stream);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  TORCH_CHECK(self.numel() == 1, "a Tensor with ", self.numel(),
              " elements cannot be converted to Scalar");
  synchronize(current_stream(self.device().index()));
  at::AutoDispatchBelowADInplaceOrView below;
  return Twins(c10::kCPU)(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  auto* memory = static_cast<c10::DeviceAllocator*>(device_allocator());
  memory->recordStream(self.storage().data_ptr(), stream);
}

// --- operators that torch would otherwise choose by the name of a device ------------------------

// The mask is drawn by the generator of the device, which the kernel of the CPU does not know.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, at::kBool)};
  }
  Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  static auto op = torch::Dispatcher::singleton()
                       .findSchemaOrThrow("torchgraft_npu::convolution", "")
                       .typed<decltype(convolution)>();
  return op.call(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  static auto op = torch::Dispatcher::singleton()
                       .findSchemaOrThrow("torchgraft_npu::convolution_backward", "")
                       .typed<decltype(convolution_backward)>();
  return op.call(grad, input, weight, stride, padding, dilation, transposed, output_padding, groups,
                 mask);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward_plain(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  std::vector<int64_t> bias(1, weight.size(transposed ? 1 : 0) * (transposed ? groups : 1));
  return at::convolution_backward(grad, input, weight, bias, stride, padding, dilation, transposed,
                                  output_padding, groups, mask);
}

int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                   bool, std::optional<double>, bool) {
  return 0;  // the one in plain operators
}

}  // namespace

// Convolutions under names of our own, so that they go the way of every other operator.
TORCH_LIBRARY_FRAGMENT(torchgraft_npu, m) {
  m.def(
      "convolution(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
      "int[] dilation, bool transposed, int[] output_padding, int groups) -> Tensor");
  m.def(
      "convolution_backward(Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, "
      "int[] dilation, bool transposed, int[] output_padding, int groups, bool[3] mask) -> "
      "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchgraft_npu, CPU, m) {
  m.impl("convolution", TORCH_FN(at::convolution));
  m.impl("convolution_backward", TORCH_FN(convolution_backward_plain));
}

TORCH_LIBRARY_IMPL(torchgraft_npu, Meta, m) {
  m.impl("convolution", TORCH_FN(at::convolution));
  m.impl("convolution_backward", TORCH_FN(convolution_backward_plain));
}

// A copy resolves these lazy marks itself; resolving them before it would take a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_sizes));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

}  // namespace graft::npu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &graft::npu::sdp_choice)
}
