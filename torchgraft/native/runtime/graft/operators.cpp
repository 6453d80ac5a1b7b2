// Operators, through the dispatcher.
#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "graft/action.h"

namespace torchgraft {
namespace {

at::Tensor wrapped(const at::Scalar& number) {
  at::Tensor made = c10::scalar_to_tensor(number);
  made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

template <typename T, typename F>
c10::IValue typed(const Values& items, F&& get) {
  c10::List<T> made;
  made.reserve(items.size());
  for (const c10::IValue& item : items) made.push_back(get(item));
  return made;
}

[[noreturn]] void unfit(const c10::IValue& value, const c10::TypePtr& type) {
  bad("an operator takes " + type->repr_str() + ", and the plan gives it " + value.tagKind());
}

c10::IValue coerced(const c10::IValue& value, const c10::TypePtr& type, int32_t count = 0);

c10::IValue coerced_list(const Values& items, const c10::TypePtr& element) {
  Values made;
  for (const c10::IValue& item : items) made.push_back(coerced(item, element));
  switch (element->kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return typed<int64_t>(made, [](auto& v) { return v.toInt(); });
    case c10::TypeKind::FloatType:
      return typed<double>(made, [](auto& v) { return v.toDouble(); });
    case c10::TypeKind::BoolType:
      return typed<bool>(made, [](auto& v) { return v.toBool(); });
    case c10::TypeKind::StringType:
      return typed<std::string>(made, [](auto& v) { return v.toStringRef(); });
    case c10::TypeKind::TensorType:
      return typed<at::Tensor>(made, [](auto& v) { return v.toTensor(); });
    case c10::TypeKind::OptionalType:
      if (element->containedType(0)->kind() == c10::TypeKind::TensorType)
        return typed<std::optional<at::Tensor>>(made, [](auto& v) {
          return v.isNone() ? std::nullopt : std::optional<at::Tensor>(v.toTensor());
        });
      [[fallthrough]];
    default: {
      c10::impl::GenericList list(element);
      for (c10::IValue& item : made) list.push_back(std::move(item));
      return list;
    }
  }
}

// A value as the schema of an operator wants it, as a call from Python would make it.
c10::IValue coerced(const c10::IValue& value, const c10::TypePtr& type, int32_t count) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      return value.isNone() ? value : coerced(value, type->containedType(0), count);
    case c10::TypeKind::TensorType:
      if (value.isTensor()) return value;
      if (value.isScalar() || value.isBool()) return wrapped(value.toScalar());
      unfit(value, type);
    case c10::TypeKind::FloatType:
      if (value.isInt()) return static_cast<double>(value.toInt());
      if (!value.isDouble()) unfit(value, type);
      return value;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      if (value.isBool()) return static_cast<int64_t>(value.toBool());
      if (!value.isInt()) unfit(value, type);
      return value;
    case c10::TypeKind::BoolType:
      if (value.isInt()) return value.toInt() != 0;
      if (!value.isBool()) unfit(value, type);
      return value;
    case c10::TypeKind::NumberType:
      if (!value.isScalar()) unfit(value, type);
      return value;
    case c10::TypeKind::StringType:
      if (!value.isString()) unfit(value, type);
      return value;
    case c10::TypeKind::DeviceObjType:
      if (!value.isDevice()) unfit(value, type);
      return value;
    case c10::TypeKind::ListType: {
      const c10::TypePtr element = type->containedType(0);
      if (const auto parts = parts_of(value)) return coerced_list(*parts, element);
      if (count > 0) return coerced_list(Values(count, value), element);
      unfit(value, type);
    }
    default:
      return value;
  }
}

bool is_open(const Value& value) {
  bool found = false;
  value.each_buffer([&](int64_t) { found = true; });
  return found;
}

// An argument that is ready to be filled in: known now, or made of buffers at each call.
class Operand {
 public:
  // `given` may be null: then it is the default.
  Operand(const c10::FunctionSchema& schema, const c10::Argument& argument, const Value* given)
      : type_(argument.type()), count_(argument.N().value_or(0)) {
    if (!given && !argument.default_value())
      bad(schema.name() + " is not given '" + argument.name() + "'");
    if (!given)
      known_ = *argument.default_value();
    else if (is_open(*given))
      open_ = given;
    else
      known_ = coerced(Frame(0).fill(*given), type_, count_);
  }

  c10::IValue fill(const Frame& frame) const {
    if (!open_) return known_;
    if (open_->kind == Value::kBuffer && type_->kind() == c10::TypeKind::TensorType &&
        frame.values[open_->buffer].isTensor())
      return frame.values[open_->buffer];
    return coerced(frame.fill(*open_), type_, count_);
  }

 private:
  c10::IValue known_;
  const Value* open_ = nullptr;
  c10::TypePtr type_;
  int32_t count_;
};

// Arguments by name.
class Named {
 public:
  explicit Named(const std::vector<std::pair<std::string, Value>>& given) {
    for (const auto& [name, value] : given) by_name_[name] = &value;
  }
  const Value* find(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

 private:
  std::map<std::string, const Value*> by_name_;
};

c10::OperatorHandle find(const Kernel& kernel) {
  const auto found = c10::Dispatcher::singleton().findSchema({kernel.name, kernel.overload});
  if (!found)
    bad("it calls " + kernel.name + (kernel.overload.empty() ? "" : "." + kernel.overload) +
        ", which this torch has not");
  return *found;
}

struct Call : Action {
  Call(const Step& step, const Kernel& kernel) : step(step), op(find(kernel)) {
    const auto& arguments = op.schema().arguments();
    const Named named(step.kwargs);
    if (step.args.size() > arguments.size())
      bad(op.schema().name() + " takes " + std::to_string(arguments.size()) + " arguments");
    size_t used = 0;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = arguments[i];
      const Value* given = i < step.args.size() ? &step.args[i] : nullptr;
      if (const Value* found = named.find(argument.name())) {
        if (given) bad(op.schema().name() + " is given '" + argument.name() + "' twice");
        given = found;
        ++used;
      }
      operands.emplace_back(op.schema(), argument, given);
    }
    if (used != step.kwargs.size()) bad(op.schema().name() + " has no argument of a name that is given");
    returns = op.schema().returns().size();
  }

  void run(Frame& frame) const override {
    torch::jit::Stack stack;
    stack.reserve(std::max(operands.size(), returns));
    for (const Operand& operand : operands) stack.push_back(operand.fill(frame));
    op.callBoxed(&stack);
    if (stack.size() == 1) return store(frame, step, over(std::move(stack[0])));
    if (stack.empty()) return store(frame, step, {});
    store(frame, step, c10::ivalue::Tuple::create(std::move(stack)));
  }

  // What there is once it is over; a collective was only started.
  virtual c10::IValue over(c10::IValue result) const { return result; }

  const Step& step;
  c10::OperatorHandle op;
  std::vector<Operand> operands;
  size_t returns;
};

// A call that other ranks take part in: started, and over when its result is there. Its last
// argument is the group, under the name that the process has registered it with.
struct Collective : Call {
  Collective(const Step& step, const Kernel& kernel)
      : Call(step, kernel), wait(find({Kernel::kOp, "_c10d_functional::wait_tensor", ""})) {
    if (kernel.name.rfind("_c10d_functional::", 0) != 0)
      bad("it talks to other ranks by " + kernel.name + ", which only Python does");
  }

  c10::IValue over(c10::IValue result) const override {
    if (!result.isTensorList()) return waited(result.toTensor());
    c10::List<at::Tensor> made;
    for (const at::Tensor& one : result.toTensorVector()) made.push_back(waited(one));
    return made;
  }

  at::Tensor waited(const at::Tensor& started) const {
    torch::jit::Stack stack{started};
    wait.callBoxed(&stack);
    return std::move(stack[0]).toTensor();
  }

  c10::OperatorHandle wait;
};

// --- An operator that writes, on copies of what it writes to: `auto_functionalized_v2` ---

struct Mutation : Action {
  // One tensor that the operator writes to: a base, or a view of one.
  struct Target {
    int64_t base = -1;  // none: the argument is None
    enum { kBase, kStrided, kSlice } kind = kBase;
    std::vector<const Value*> about;
  };
  struct Argument {
    std::optional<Operand> operand;   // what it only reads
    std::vector<Target> targets;
    bool list = false;
  };

  Mutation(const Step& step, const Callees& callees)
      : step(step), op(find(operator_of(step, callees))), bases(list_of(step, "_all_bases")) {
    const Named named(step.kwargs);
    const Value* some = named.find("_only_clone_these_bases");
    const bool all = !some || some->kind == Value::kLiteral;
    cloned.assign(bases->items.size(), all);
    if (!all)
      for (const Value& item : some->items) cloned[base_of(item)] = true;
    for (const c10::Argument& argument : op.schema().arguments()) {
      Argument made;
      if (!argument.alias_info() || !argument.alias_info()->isWrite()) {
        made.operand.emplace(op.schema(), argument, named.find(argument.name()));
      } else if (const Value* length = named.find("_" + argument.name() + "_length")) {
        made.list = true;
        for (int64_t i = 0; i < index(length->literal.isInt() ? length->literal.toInt() : -1); ++i)
          made.targets.push_back(target(named, "_" + argument.name() + "_" + std::to_string(i)));
      } else {
        made.targets.push_back(target(named, "_" + argument.name()));
      }
      arguments.push_back(std::move(made));
    }
  }

  static const Kernel& operator_of(const Step& step, const Callees& callees) {
    const auto found = callees.operators.find(
        step.args.size() == 1 && step.args[0].kind == Value::kBuffer ? step.args[0].buffer : -1);
    if (found == callees.operators.end()) bad("auto_functionalized_v2 is given no operator");
    return found->second;
  }

  static const Value* list_of(const Step& step, const char* name) {
    const Value* found = Named(step.kwargs).find(name);
    if (!found || found->kind != Value::kList) bad(std::string("auto_functionalized_v2 has no ") + name);
    return found;
  }

  int64_t base_of(const Value& value) const {
    const int64_t base = value.literal.isInt() ? value.literal.toInt() : -1;
    if (base < 0 || base >= static_cast<int64_t>(bases->items.size()))
      bad("auto_functionalized_v2 writes to a tensor that it is not given");
    return base;
  }

  Target target(const Named& named, const std::string& prefix) const {
    const Value* base = named.find(prefix + "_base_index");
    if (!base) bad(op.schema().name() + " writes in a way that only Python knows; save it without");
    Target made;
    if (base->kind == Value::kLiteral && base->literal.isNone()) return made;
    made.base = base_of(*base);
    const auto about = [&](auto kind, std::initializer_list<const char*> names) {
      made.kind = kind;
      for (const char* name : names) {
        made.about.push_back(named.find(prefix + name));
        if (!made.about.back()) bad("auto_functionalized_v2 is given part of a view");
      }
    };
    if (named.find(prefix + "_storage_offset"))
      about(Target::kStrided, {"_size", "_stride", "_storage_offset"});
    else if (named.find(prefix + "_slice_dim"))
      about(Target::kSlice, {"_slice_dim", "_slice_start", "_slice_end"});
    return made;
  }

  static at::Tensor copied(const at::Tensor& tensor) {
    int64_t reach = tensor.numel() ? 1 : 0;
    for (int64_t i = 0; reach && i < tensor.dim(); ++i) reach += (tensor.size(i) - 1) * tensor.stride(i);
    return tensor.as_strided({reach}, {1}).clone().as_strided(tensor.sizes(), tensor.strides(), 0);
  }

  static std::vector<int64_t> sizes(const c10::IValue& value) {
    std::vector<int64_t> made;
    for (const c10::IValue& size : parts_of(value).value_or(Values())) made.push_back(size.toInt());
    return made;
  }

  c10::IValue viewed(const Frame& frame, const Target& target, const std::vector<at::Tensor>& fresh) const {
    if (target.base < 0) return {};
    const at::Tensor& base = fresh[target.base];
    if (target.kind == Target::kBase) return base;
    Values about;
    for (const Value* value : target.about) about.push_back(frame.fill(*value));
    if (target.kind == Target::kStrided)
      return base.as_strided(sizes(about[0]), sizes(about[1]), about[2].toInt());
    const auto edge = [](const c10::IValue& at) {
      return at.isNone() ? std::nullopt : std::optional<int64_t>(at.toInt());
    };
    return base.slice(about[0].toInt(), edge(about[1]), edge(about[2]));
  }

  void run(Frame& frame) const override {
    std::vector<at::Tensor> fresh;
    for (const Value& base : bases->items) {
      const c10::IValue given = frame.fill(base);
      if (!given.isTensor()) throw Error("an operator writes to " + given.tagKind());
      fresh.push_back(cloned[fresh.size()] ? copied(given.toTensor()) : given.toTensor());
    }
    torch::jit::Stack stack;
    for (const Argument& argument : arguments) {
      if (argument.operand) {
        stack.push_back(argument.operand->fill(frame));
      } else if (!argument.list) {
        stack.push_back(viewed(frame, argument.targets[0], fresh));
      } else {
        c10::List<at::Tensor> written;
        for (const Target& target : argument.targets)
          written.push_back(viewed(frame, target, fresh).toTensor());
        stack.push_back(std::move(written));
      }
    }
    op.callBoxed(&stack);
    if (stack.empty()) stack.emplace_back();  // as in Python, which gives None
    for (at::Tensor& base : fresh) stack.emplace_back(std::move(base));
    store(frame, step, c10::ivalue::Tuple::create(std::move(stack)));
  }

  const Step& step;
  c10::OperatorHandle op;
  const Value* bases;
  std::vector<bool> cloned;
  std::vector<Argument> arguments;
};

}  // namespace

std::unique_ptr<Action> call_operator(const Step& step, const Kernel& kernel) {
  if (step.collective) return std::make_unique<Collective>(step, kernel);
  return std::make_unique<Call>(step, kernel);
}

std::unique_ptr<Action> call_mutation(const Step& step, const Callees& callees) {
  return std::make_unique<Mutation>(step, callees);
}

}  // namespace torchgraft
