// Operators of an extension: kernels for the npu that call kernels by their aclnn names, kernels
// for shapes, and gradients bound in C++.
#include "pytorch_npu_helper.hpp"  // brings torch/extension.h, as on an NPU
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/utils/OpAdapter.h"

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

TORCH_LIBRARY(scaled_ops, m) {
  m.def("scale_sum(Tensor x, Tensor y, float alpha) -> Tensor");
  m.def("scale_sum_backward(Tensor grad, float alpha) -> (Tensor, Tensor)");
  m.def("halves(Tensor x) -> (Tensor, Tensor)");
}

at::Tensor scale_sum_npu(const at::Tensor& x, const at::Tensor& y, double alpha) {
  at::Tensor result = at_npu::native::OpPreparation::apply_tensor_without_format(x);
  EXEC_NPU_CMD(aclnnScaleSum, x, y, alpha, result);
  return result;
}

std::tuple<at::Tensor, at::Tensor> scale_sum_backward_npu(const at::Tensor& grad, double alpha) {
  return {grad.clone(), grad * alpha};
}

std::tuple<at::Tensor, at::Tensor> halves_npu(const at::Tensor& x) {
  TORCH_CHECK(c10_npu::getCurrentNPUStream().device().index() == x.device().index());
  at::Tensor low = at::empty({x.size(0) / 2}, x.options());
  at::Tensor high = at::empty({x.size(0) / 2}, x.options());
  EXEC_NPU_CMD(aclnnHalves, x, low, high);
  return {low, high};
}

at::Tensor scale_sum_meta(const at::Tensor& x, const at::Tensor& y, double alpha) {
  return at::empty_like(x);
}

at::Tensor scale_sum(const at::Tensor& x, const at::Tensor& y, double alpha) {
  static auto op = torch::Dispatcher::singleton()
                       .findSchemaOrThrow("scaled_ops::scale_sum", "")
                       .typed<decltype(scale_sum)>();
  return op.call(x, y, alpha);
}

class ScaleSum : public torch::autograd::Function<ScaleSum> {
 public:
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x, at::Tensor y, double alpha) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["alpha"] = alpha;
    return scale_sum(x, y, alpha);
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    static auto op = torch::Dispatcher::singleton()
                         .findSchemaOrThrow("scaled_ops::scale_sum_backward", "")
                         .typed<decltype(scale_sum_backward_npu)>();
    auto [x, y] = op.call(grads[0], ctx->saved_data["alpha"].toDouble());
    return {x, y, at::Tensor()};
  }
};

at::Tensor scale_sum_autograd(const at::Tensor& x, const at::Tensor& y, double alpha) {
  return ScaleSum::apply(x, y, alpha);
}

TORCH_LIBRARY_IMPL(scaled_ops, PrivateUse1, m) {
  m.impl("scale_sum", &scale_sum_npu);
  m.impl("scale_sum_backward", &scale_sum_backward_npu);
  m.impl("halves", &halves_npu);
}

TORCH_LIBRARY_IMPL(scaled_ops, AutogradPrivateUse1, m) { m.impl("scale_sum", &scale_sum_autograd); }

TORCH_LIBRARY_IMPL(scaled_ops, Meta, m) { m.impl("scale_sum", &scale_sum_meta); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scale_sum", &scale_sum_autograd, "x + alpha y"); }
