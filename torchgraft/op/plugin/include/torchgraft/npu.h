// What the kernels of op-plugin are written with, off an NPU: a kernel that is asked for by its
// aclnn name is the torch operator of the prototype, on whatever device the tensors are.
#pragma once

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

namespace torchgraft {

template <class T>
c10::IValue to_value(const T& value) {
  return c10::IValue(value);
}
inline c10::IValue to_value(const char* value) { return c10::IValue(std::string(value)); }
inline c10::IValue to_value(float value) { return c10::IValue(static_cast<double>(value)); }
inline c10::IValue to_value(const std::vector<at::Tensor>& values) {
  return c10::IValue(c10::List<at::Tensor>(values));
}
inline c10::IValue to_value(at::TensorList values) { return to_value(values.vec()); }
inline c10::IValue to_value(const at::Tensor& value) {
  return value.defined() ? c10::IValue(value) : c10::IValue();
}

// The value as the schema wants it: an integer may stand for a real number.
inline c10::IValue fit(const c10::IValue& value, const c10::TypePtr& type) {
  auto kind = type->kind();
  if (kind == c10::TypeKind::OptionalType) {
    return value.isNone() ? value : fit(value, type->castRaw<c10::OptionalType>()->getElementType());
  }
  if (kind == c10::TypeKind::FloatType && value.isInt()) return static_cast<double>(value.toInt());
  if (kind == c10::TypeKind::FloatType && value.isBool()) return value.toBool() ? 1.0 : 0.0;
  if (kind == c10::TypeKind::IntType && value.isBool()) return static_cast<int64_t>(value.toBool());
  if (kind == c10::TypeKind::IntType && value.isDouble()) {
    return static_cast<int64_t>(value.toDouble());
  }
  if (kind == c10::TypeKind::BoolType && value.isInt()) return value.toInt() != 0;
  return value;
}

inline bool is_meta(const c10::IValue& value) { return value.isTensor() && value.toTensor().is_meta(); }

inline void copy_out(const char* name, const c10::IValue& from, const c10::IValue& to) {
  if (to.isTensorList()) {
    auto sources = from.toTensorVector(), targets = to.toTensorVector();
    TORCH_CHECK(sources.size() == targets.size(), name, ": the kernel returned ", sources.size(),
                " tensors, and there is room for ", targets.size());
    for (size_t i = 0; i < sources.size(); ++i) copy_out(name, sources[i], targets[i]);
    return;
  }
  auto source = from.toTensor(), target = to.toTensor();
  TORCH_CHECK(source.sizes() == target.sizes() && source.dtype() == target.dtype(), name,
              ": the kernel returned ", source.dtype(), " ", source.sizes(), ", the output is ",
              target.dtype(), " ", target.sizes());
  target.copy_(source);
}

// Inputs, attributes in the order of the prototype, then the outputs, which are written.
inline void execute(const char* name, std::vector<c10::IValue> values) {
  std::string op(name);
  if (op.rfind("aclnn", 0) == 0) op = op.substr(5);
  auto handle = c10::Dispatcher::singleton().findSchema({"ge::" + op, ""});
  TORCH_CHECK(handle.has_value(), name, ": there is no operator ge::", op,
              ". Load its prototype (a REG_OP header or a JSON file), or declare it.");
  const auto& schema = handle->schema();
  auto is_size = [](const c10::Argument& arg) { return arg.name().rfind("size_of_", 0) == 0; };
  size_t wanted = 0;
  for (const auto& arg : schema.arguments()) wanted += !is_size(arg);
  TORCH_CHECK(values.size() == wanted || values.size() == wanted + schema.returns().size(), name,
              " was called with ", values.size(), " arguments; it takes those of ", schema,
              ", then the outputs");
  for (const auto& value : values) {
    if (is_meta(value)) return;  // the outputs have their shapes already
  }
  std::vector<c10::IValue> stack, outs(values.begin() + wanted, values.end());
  size_t next = 0, list = 0;
  for (const auto& arg : schema.arguments()) {
    if (!is_size(arg)) {
      stack.push_back(fit(values[next++], arg.type()));
      continue;
    }
    while (list < outs.size() && !outs[list].isTensorList()) ++list;
    TORCH_CHECK(list < outs.size(), name, ": pass the outputs, to say how many ", arg.name(), " is");
    stack.push_back(static_cast<int64_t>(outs[list++].toListRef().size()));
  }
  handle->callBoxed(stack);
  for (size_t i = 0; i < outs.size(); ++i) copy_out(name, stack[i], outs[i]);
}

template <class... Values>
void run(const char* name, const Values&... values) {
  execute(name, {to_value(values)...});
}

}  // namespace torchgraft

#define EXEC_NPU_CMD(api, ...) ::torchgraft::run(#api, __VA_ARGS__)
#define EXEC_NPU_NO_FORMAT_CHECK_CMD(api, ...) ::torchgraft::run(#api, __VA_ARGS__)
#define DO_COMPATIBILITY(api, otherwise) \
  do {                                   \
  } while (false)

namespace at_npu {
namespace native {

struct OpPreparation {
  static at::Tensor apply_tensor_without_format(const at::Tensor& like) {
    return at::empty(like.sizes(), like.options());
  }
  static at::Tensor apply_tensor_without_format(const at::Tensor& like, at::IntArrayRef sizes) {
    return at::empty(sizes, like.options());
  }
  static at::Tensor apply_tensor_without_format(at::IntArrayRef sizes, at::TensorOptions options) {
    return at::empty(sizes, options);
  }
  template <class... Values>
  static at::Tensor apply_tensor(const Values&... values) {
    return apply_tensor_without_format(values...);
  }
  static void check_tensor(std::initializer_list<at::Tensor>, const at::Tensor& out,
                           at::ScalarType dtype, at::IntArrayRef sizes) {
    TORCH_CHECK(out.scalar_type() == dtype, "out is ", out.scalar_type(), ", expected ", dtype);
    if (out.sizes() != sizes) out.resize_(sizes);
  }
  static void check_tensor(std::initializer_list<at::Tensor> in, const at::Tensor& out,
                           const at::Tensor& like) {
    check_tensor(in, out, like.scalar_type(), like.sizes());
  }
};

}  // namespace native
}  // namespace at_npu

namespace op_infer {

using Sizes = c10::SmallVector<int64_t, 8>;

inline Sizes array_to_small_vector(at::IntArrayRef sizes) { return {sizes.begin(), sizes.end()}; }
inline Sizes broadcast_ops_npu_output_size(at::IntArrayRef a, at::IntArrayRef b) {
  auto sizes = at::infer_size(a, b);
  return {sizes.begin(), sizes.end()};
}
inline Sizes broadcast_ops_npu_output_size(const at::Tensor& a, const at::Tensor& b) {
  return broadcast_ops_npu_output_size(a.sizes(), b.sizes());
}
inline Sizes input_same_output_size(const at::Tensor& a) { return array_to_small_vector(a.sizes()); }

}  // namespace op_infer

namespace op_api {}
namespace acl_op {}
