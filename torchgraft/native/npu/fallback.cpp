// Every operator that the device has no kernel of its own for: the kernel of the CPU runs on the
// memory of the device, on the thread of the current stream, after the call has returned.
//
// For that the shapes of the results must be known. They come from the operator's Meta kernel.
// Where there is none, or it declines, the call waits for the stream and runs at once.
#include "guard.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_set>

namespace graft::npu {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

template <class F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& one : value.toTensorVector()) made.push_back(f(one));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& one : value.toOptionalTensorVector()) {
      made.push_back(one ? std::optional<Tensor>(f(*one)) : std::nullopt);
    }
    return made;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F f) {
  map_tensors(value, [&](const Tensor& tensor) {
    if (tensor.defined()) f(tensor);
    return tensor;
  });
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Operators that take tensors of the host beside those of the device, as on every accelerator.
bool takes_host_tensors(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> known = {
      "aten::index",        "aten::index_put_",           "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_pack_padded_sequence", "aten::_ctc_loss",
      "aten::index_put",    "aten::_unsafe_index_put"};
  const auto& name = op.schema().name();
  return known.count(name) || name.rfind("aten::", 0) != 0;
}

// Operators whose Meta kernels describe what a kernel of CUDA makes, and that of the CPU does not.
bool has_other_shapes(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> known = {
      "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_embedding_bag",
      "aten::_embedding_bag_forward_only"};
  return known.count(op.schema().name());
}

// A call of an operator, in the forms in which it is needed.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), args_(torch::jit::last(*stack, op.schema().arguments().size()).vec()) {
    find_device();
    for (IValue& arg : args_) arg = map_tensors(arg, [](const Tensor& tensor) {
      bool scalar = tensor.defined() && tensor.device().is_cpu();
      if (!scalar) return tensor;
      Tensor taken = tensor.detach().clone();  // the caller may write it before the stream runs
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        taken.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      return taken;
    });
  }

  void run() {
    c10::DeviceGuard guard(c10::Device(kNpu, device_));
    if (is_view()) return view();
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                                schema().operator_name(), " has no kernel for the npu, and none for ",
                                "the CPU that could stand in for it");
    seed_generators();
    if (!later()) now();
  }

 private:
  const c10::FunctionSchema& schema() const { return op_.schema(); }

  void find_device() {
    std::optional<c10::Device> found, host;
    for (const IValue& arg : args_) {
      each_tensor(arg, [&](const Tensor& tensor) {
        if (is_npu(tensor)) {
          TORCH_CHECK(!found || *found == tensor.device(), schema().name(),
                      ": Expected all tensors to be on the same device, but found at least two "
                      "devices, ", *found, " and ", tensor.device(), "!");
          found = tensor.device();
        } else if (tensor.dim() > 0) {
          host = tensor.device();
        }
      });
    }
    for (const IValue& arg : args_) {
      if (arg.isDevice() && !found && arg.toDevice().type() == kNpu) found = arg.toDevice();
    }
    TORCH_CHECK(!found || !host || takes_host_tensors(op_), schema().name(),
                ": Expected all tensors to be on the same device, but found at least two devices, ",
                *found, " and ", *host, "!");
    device_ = found && found->has_index() ? found->index() : current_device();
  }

  bool is_view() const {
    bool some = false;
    for (const auto& one : schema().returns()) {
      some = some || (one.alias_info() && !one.alias_info()->isWrite());
    }
    return some;
  }

  // The arguments for a device: `twins` makes the tensors, everything else that names the npu is
  // replaced as well.
  Stack arguments(Twins& twins, c10::DeviceType device) const {
    Stack made;
    for (const IValue& arg : args_) {
      if (arg.isDevice()) {
        made.emplace_back(c10::Device(device));
      } else if (arg.isGenerator() && device == c10::kMeta) {
        made.emplace_back();
      } else {
        made.push_back(map_tensors(arg, [&](const Tensor& tensor) {
          if (is_npu(tensor)) return twins(tensor);
          bool shape_only = device == c10::kMeta && tensor.defined() && tensor.dim() > 0;
          return shape_only ? tensor.to(c10::kMeta) : tensor;  // a number stays: torch asks for it
        }));
      }
    }
    return made;
  }

  void seed_generators() {
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto& type = schema().arguments()[i].type();
      if (!type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) continue;
      auto given = args_[i].isGenerator() ? std::optional(args_[i].toGenerator()) : std::nullopt;
      args_[i] = at::detail::createCPUGenerator(draw_seed(given, device_));
    }
  }

  void give(Stack results) {
    torch::jit::drop(*stack_, args_.size());
    for (IValue& result : results) stack_->push_back(std::move(result));
  }

  // What stands for a written argument among the results is the argument itself.
  const IValue* argument_for(const c10::Argument& result) const {
    if (!is_written(result)) return nullptr;
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto* alias = schema().arguments()[i].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) return &args_[i];
    }
    return nullptr;
  }

  Tensor allocate(const Tensor& like) const {
    if (!like.defined()) return like;
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(kNpu, device_));
  }

  void view() {
    Twins twins(c10::kMeta);
    Stack stack = arguments(twins, c10::kMeta);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    }
    for (IValue& result : stack) {
      result = map_tensors(result, [&](const Tensor& twin) {
        const Tensor* original = twins.original(twin);
        TORCH_CHECK(original, schema().name(), " made a view of none of its arguments");
        return over(twin, original->storage(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
      });
    }
    give(std::move(stack));
  }

  // Hands the call to the current stream, and returns whether that could be done.
  bool later() {
    if (has_other_shapes(op_)) return false;
    for (const auto& one : schema().returns()) {
      auto kind = one.type()->kind();
      bool list = kind == c10::TypeKind::ListType &&
                  one.type()->castRaw<c10::ListType>()->getElementType()->kind() ==
                      c10::TypeKind::TensorType;
      if (kind != c10::TypeKind::TensorType && !list) return false;
    }
    Twins shapes(c10::kMeta);
    Stack stack = arguments(shapes, c10::kMeta), given = stack;
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return false;  // the kernel of the CPU says what is wrong, if something is
    }
    bool fresh = true;
    for (size_t i = 0; i < stack.size(); ++i) {
      if (argument_for(schema().returns()[i])) continue;
      each_tensor(stack[i], [&](const Tensor& made) {
        fresh = fresh && made.is_meta() && !shapes.original(made) && !made.is_conj() && !made.is_neg();
      });
    }
    if (!fresh) return false;
    resize_written(given);

    Stack results;
    for (size_t i = 0; i < stack.size(); ++i) {
      const IValue* same = argument_for(schema().returns()[i]);
      results.push_back(same ? *same : map_tensors(stack[i], [&](const Tensor& made) {
        return allocate(made);
      }));
    }
    Twins twins(c10::kCPU);
    Stack work = arguments(twins, c10::kCPU), targets;
    for (size_t i = 0; i < results.size(); ++i) {
      bool same = argument_for(schema().returns()[i]);
      targets.push_back(same ? IValue() : map_tensors(results[i], [&](const Tensor& tensor) {
        return tensor.defined() ? twins(tensor) : tensor;
      }));
    }
    queue_of(current_stream(device_))
        .push(schema().name(), [op = op_, work = std::move(work), targets = std::move(targets)] {
          Stack running = work;
          auto written = unmarked(op, work);
          at::AutoDispatchBelowADInplaceOrView below;
          op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &running);
          resolve(written);
          for (size_t i = 0; i < targets.size(); ++i) fill(targets[i], running[i]);
        });
    give(std::move(results));
    return true;
  }

  // A kernel may write conjugates and leave a mark on its twin that says so, where the tensor of
  // the device has none: what is written and not marked, before the kernel runs.
  static std::vector<Tensor> unmarked(const c10::OperatorHandle& op, const Stack& twins) {
    std::vector<Tensor> found;
    for (size_t i = 0; i < twins.size(); ++i) {
      if (!is_written(op.schema().arguments()[i])) continue;
      each_tensor(twins[i], [&](const Tensor& twin) {
        if (!twin.is_conj()) found.push_back(twin);
      });
    }
    return found;
  }

  static void resolve(const std::vector<Tensor>& twins) {
    for (const Tensor& twin : twins) {
      if (!twin.is_conj()) continue;
      twin._set_conj(false);
      twin.conj_physical_();
    }
  }

  static void fill(const IValue& target, const IValue& made) {
    std::vector<Tensor> from;
    each_tensor(made, [&](const Tensor& tensor) { from.push_back(tensor); });
    size_t i = 0;
    each_tensor(target, [&](const Tensor& to) {
      TORCH_CHECK(i < from.size() && from[i].sizes() == to.sizes(), "its Meta kernel promised a shape of ",
                  to.sizes(), ", its kernel made ", i < from.size() ? c10::str(from[i].sizes()) : "nothing");
      to.copy_(from[i++]);  // in the type of a device: the CPU keeps statistics of halves in half
    });
  }

  // `out=` tensors, in the sizes that the Meta kernel has given them.
  void resize_written(const Stack& shapes) {
    for (size_t i = 0; i < args_.size(); ++i) {
      if (!is_written(schema().arguments()[i]) || !args_[i].isTensor()) continue;
      const Tensor& shape = shapes[i].toTensor();
      const Tensor& tensor = args_[i].toTensor();
      if (is_npu(tensor) && tensor.sizes() != shape.sizes()) {
        resize(tensor, shape.sizes(), shape.strides());
      }
    }
  }

  // Runs the call on this thread, when the stream is done.
  void now() {
    synchronize(current_stream(device_));
    Twins twins(c10::kCPU);
    Stack stack = arguments(twins, c10::kCPU);
    for (size_t i = 0; i < args_.size(); ++i) {  // memory of the device cannot grow under a kernel
      const auto& argument = schema().arguments()[i];
      if (is_written(argument) && argument.kwarg_only() && stack[i].isTensor()) {
        stack[i] = stack[i].toTensor().clone();
      }
    }
    Stack given = stack;
    auto written = unmarked(op_, given);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      resolve(written);
    }
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto& argument = schema().arguments()[i];
      if (!is_written(argument) || !argument.kwarg_only() || !args_[i].isTensor()) continue;
      Tensor made = given[i].toTensor(), tensor = args_[i].toTensor();
      if (tensor.sizes() != made.sizes()) resize(tensor, made.sizes(), made.strides());
      tensor.copy_(made);
    }
    for (size_t i = 0; i < stack.size(); ++i) {
      if (const IValue* same = argument_for(schema().returns()[i])) {
        stack[i] = *same;
        continue;
      }
      stack[i] = map_tensors(stack[i], [&](const Tensor& made) {
        if (!made.defined() || !made.device().is_cpu()) return made;
        if (const Tensor* original = twins.original(made)) {
          return over(made, original->storage(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
        }
        Tensor result = allocate(made.resolve_conj().resolve_neg());
        result.copy_(made);
        return result;
      });
    }
    give(std::move(stack));
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  Stack args_;
  c10::DeviceIndex device_ = 0;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, stack).run();
}

// A device has statistics in float; the CPU's kernel wants them as its own forward made them.
void layer_norm_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t kInput = 1, kMean = 3, kRstd = 4, kWeight = 5;
  const size_t count = op.schema().arguments().size();
  const auto at = [&](size_t i) -> IValue& { return torch::jit::peek(*stack, i, count); };
  const auto type = at(kInput).toTensor().scalar_type();
  const auto weight = at(kWeight).toOptional<Tensor>();
  if (!weight || !weight->defined() || weight->scalar_type() == type)
    for (size_t i : {kMean, kRstd}) at(i) = at(i).toTensor().to(type);
  fallback(op, keys, stack);
}

void no_sparse(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": the simulated npu has no sparse tensors. "
                              "Use a dense one (.to_dense()), or compute this on the CPU (.cpu()).");
}

void no_nested(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": the simulated npu has no nested tensors of this "
                              "layout. Use layout=torch.jagged, or compute this on the CPU (.cpu()).");
}

void no_quantized(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": the simulated npu has no quantized tensors. "
                              "Use torch.fake_quantize_per_tensor_affine, or compute this on the CPU (.cpu()).");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Torch would put these together from others, which round at every step.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&layer_norm_backward>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const char* name : {"quantize_per_tensor", "quantize_per_tensor.tensor_qparams",
                           "quantize_per_tensor_dynamic", "quantize_per_channel"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_quantized>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
}

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_nested>());
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_quantized>());
}

}  // namespace graft::npu
