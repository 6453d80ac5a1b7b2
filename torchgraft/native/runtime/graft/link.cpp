#include "graft/link.h"

#include <cmath>
#include <deque>
#include <set>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ScalarOps.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include "graft/cuda.h"

namespace torchgraft {
namespace {

constexpr const char* kMain = "main";
constexpr size_t kContexts = 4;  // calls of one CPU region at the same time; the others wait

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
      if (value.isList()) return coerced_list(value.toListRef().vec(), element);
      if (value.isTuple()) {
        const auto& items = value.toTupleRef().elements();
        return coerced_list(Values(items.begin(), items.end()), element);
      }
      if (count > 0) return coerced_list(Values(count, value), element);
      unfit(value, type);
    }
    default:
      return value;
  }
}

// An argument that is ready to be filled in: known now, or made of buffers at each call.
struct Operand {
  c10::IValue known;
  const Value* open = nullptr;
  c10::TypePtr type;
  int32_t count = 0;
  bool direct = false;  // a buffer whose value needs no look
};

struct Frame {
  explicit Frame(size_t buffers) : values(buffers) {}
  Values values;

  c10::IValue fill(const Value& value) const {
    if (value.kind == Value::kBuffer) return values[value.buffer];
    if (value.kind == Value::kLiteral) return value.literal;
    Values items;
    for (const Value& item : value.items) items.push_back(fill(item));
    if (value.kind == Value::kTuple) return c10::ivalue::Tuple::create(std::move(items));
    c10::impl::GenericList list(c10::AnyType::get());
    for (c10::IValue& item : items) list.push_back(std::move(item));
    return list;
  }

  c10::IValue fill(const Operand& operand) const {
    if (operand.open == nullptr) return operand.known;
    const c10::IValue& raw = values[operand.open->kind == Value::kBuffer ? operand.open->buffer : 0];
    if (operand.open->kind == Value::kBuffer && operand.type->kind() == c10::TypeKind::TensorType &&
        raw.isTensor())
      return raw;
    return coerced(fill(*operand.open), operand.type, operand.count);
  }
};

struct Action {
  virtual ~Action() = default;
  virtual void run(Frame& frame) const = 0;
};

bool is_open(const Value& value) {
  bool found = false;
  value.each_buffer([&](int64_t) { found = true; });
  return found;
}

void store(Frame& frame, const Step& step, c10::IValue result) {
  if (!step.unpack) {
    if (!step.outputs.empty() && step.outputs[0] >= 0) frame.values[step.outputs[0]] = std::move(result);
    return;
  }
  Values parts;
  if (result.isTuple()) {
    const auto& items = result.toTupleRef().elements();
    parts.assign(items.begin(), items.end());
  } else if (result.isList()) {
    parts = result.toListRef().vec();
  } else {
    throw Error("a kernel gave one value where the plan has several");
  }
  if (parts.size() < step.outputs.size())
    throw Error("a kernel gave " + std::to_string(parts.size()) + " values where the plan has " +
                std::to_string(step.outputs.size()));
  for (size_t i = 0; i < step.outputs.size(); ++i)
    if (step.outputs[i] >= 0) frame.values[step.outputs[i]] = std::move(parts[i]);
}

// --- Operators, through the dispatcher ---

struct Call : Action {
  Call(const Step& step, const Kernel& kernel) : step(step), op(find(kernel)) {
    const auto& arguments = op.schema().arguments();
    std::map<std::string, const Value*> named;
    for (const auto& [name, value] : step.kwargs) named[name] = &value;
    if (step.args.size() > arguments.size())
      bad(op.schema().name() + " takes " + std::to_string(arguments.size()) + " arguments");
    size_t used = 0;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = arguments[i];
      Operand operand;
      operand.type = argument.type();
      operand.count = argument.N().value_or(0);
      const Value* given = i < step.args.size() ? &step.args[i] : nullptr;
      if (const auto found = named.find(argument.name()); found != named.end()) {
        if (given) bad(op.schema().name() + " is given '" + argument.name() + "' twice");
        given = found->second;
        ++used;
      }
      if (!given && !argument.default_value())
        bad(op.schema().name() + " is not given '" + argument.name() + "'");
      if (!given)
        operand.known = *argument.default_value();
      else if (is_open(*given))
        operand.open = given;
      else
        operand.known = coerced(Frame(0).fill(*given), operand.type, operand.count);
      operands.push_back(std::move(operand));
    }
    if (used != named.size()) bad(op.schema().name() + " has no argument of a name that is given");
    returns = op.schema().returns().size();
  }

  static c10::OperatorHandle find(const Kernel& kernel) {
    const auto found = c10::Dispatcher::singleton().findSchema({kernel.name, kernel.overload});
    if (!found)
      bad("it calls " + kernel.name + (kernel.overload.empty() ? "" : "." + kernel.overload) +
          ", which this torch has not");
    return *found;
  }

  void run(Frame& frame) const override {
    torch::jit::Stack stack;
    stack.reserve(std::max(operands.size(), returns));
    for (const Operand& operand : operands) stack.push_back(frame.fill(operand));
    op.callBoxed(&stack);
    if (stack.size() == 1) return store(frame, step, std::move(stack[0]));
    if (stack.empty()) return store(frame, step, {});
    store(frame, step, c10::ivalue::Tuple::create(std::move(stack)));
  }

  const Step& step;
  c10::OperatorHandle op;
  std::vector<Operand> operands;
  size_t returns;
};

// --- Generated code ---

struct Region : Action {
  Region(const Step& step, const Kernel& kernel, const Values& values)
      : step(step), ints(kernel.ints), int_outputs(kernel.int_outputs) {
    if (!step.kwargs.empty()) bad("a library takes no named arguments");
    if (kernel.ints.size() != step.args.size()) bad("a library takes another number of arguments");
    if (!step.unpack) bad("a library gives a list of values");
    try {
      if (kernel.device.type() == c10::kCPU) {
        runner = std::make_unique<torch::inductor::AOTIModelContainerRunnerCpu>(kernel.path, kContexts);
      } else {
        const auto& known = torch::inductor::getAOTIModelRunnerRegistry();
        const auto made = known.find(c10::DeviceTypeName(kernel.device.type(), true));
        if (made == known.end()) bad("this torch runs no generated code on " + kernel.device.str());
        // Without the container's own turns: it would wait for the call before to end on the device,
        // and ask for that while a graph is captured.
        runner = made->second(kernel.path, 1, kernel.device.str(), "", true);
        turn = std::make_unique<std::mutex>();
      }
      for (const auto& [name, at] : kernel.constants) {
        if (!values[at].isTensor()) bad("a constant of generated code is no tensor");
        constants[name] = values[at].toTensor().detach();
      }
      if (!constants.empty()) runner->update_constant_buffer(constants, false, true, true);
    } catch (const c10::Error& error) {
      bad(std::string("its generated code cannot be loaded (") + error.what_without_backtrace() + ")");
    } catch (const BadPackage&) {
      throw;
    } catch (const std::exception& error) {
      bad(std::string("its generated code cannot be loaded (") + error.what() + ")");
    }
  }

  // A container keeps a handle of each constant that it never frees (`MaybeOwningAtenTensorHandle`,
  // torch 2.11 to 2.13), so what the handle refers to is let go of here, or weights would stay.
  ~Region() override {
    runner.reset();
    for (auto& [name, tensor] : constants) tensor.unsafeGetTensorImpl()->release_resources();
  }

  void run(Frame& frame) const override {
    std::vector<at::Tensor> inputs;
    inputs.reserve(step.args.size());
    for (size_t i = 0; i < step.args.size(); ++i) {
      c10::IValue value = frame.fill(step.args[i]);
      if (ints[i]) {
        inputs.push_back(at::zeros({}, at::kByte).expand({value.toInt()}));  // read for its size
      } else {
        if (!value.isTensor()) throw Error("generated code is given " + value.tagKind() + " for a tensor");
        inputs.push_back(std::move(value).toTensor());
      }
    }
    std::vector<at::Tensor> made = launch(inputs);
    if (made.size() < step.outputs.size())
      throw Error("a region gave " + std::to_string(made.size()) + " values where the plan has " +
                  std::to_string(step.outputs.size()));
    for (size_t i = 0; i < step.outputs.size(); ++i) {
      if (step.outputs[i] < 0) continue;
      if (i < int_outputs.size() && int_outputs[i])
        frame.values[step.outputs[i]] = made[i].item<int64_t>();
      else
        frame.values[step.outputs[i]] = std::move(made[i]);
    }
  }

  std::vector<at::Tensor> launch(const std::vector<at::Tensor>& inputs) const {
    const auto hold = turn ? std::unique_lock<std::mutex>(*turn) : std::unique_lock<std::mutex>();
    return runner->run(inputs);
  }

  // Whether a plan is this call and nothing else.
  bool is_all_of(const Plan& plan) const {
    const auto row = [](const std::vector<Value>& values, const std::vector<int64_t>& buffers) {
      return std::equal(values.begin(), values.end(), buffers.begin(), buffers.end(),
                        [](const Value& value, int64_t buffer) {
                          return value.kind == Value::kBuffer && value.buffer == buffer;
                        });
    };
    const auto none = [](const std::vector<bool>& flags) {
      return std::find(flags.begin(), flags.end(), true) == flags.end();
    };
    return row(step.args, plan.inputs) && row(plan.outputs, step.outputs) && none(ints) &&
        none(int_outputs);
  }

  // The call of such a plan.
  Values run(Values values) const {
    std::vector<at::Tensor> inputs;
    inputs.reserve(values.size());
    for (c10::IValue& value : values) {
      if (!value.isTensor()) throw Error("generated code is given " + value.tagKind() + " for a tensor");
      inputs.push_back(std::move(value).toTensor());
    }
    std::vector<at::Tensor> made = launch(inputs);
    if (made.size() != step.outputs.size())
      throw Error("a region gave " + std::to_string(made.size()) + " values where the plan has " +
                  std::to_string(step.outputs.size()));
    return Values(std::make_move_iterator(made.begin()), std::make_move_iterator(made.end()));
  }

  const Step& step;
  std::vector<bool> ints, int_outputs;
  std::unordered_map<std::string, at::Tensor> constants;  // of tensors of their own: aliases
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner;
  std::unique_ptr<std::mutex> turn;  // on a device: one call enqueues at a time
};

// --- Arithmetic of sizes, and parts of sequences ---

struct Builtin : Action {
  Builtin(const Step& step, const Kernel& kernel) : step(step), name(kernel.name) {
    static const std::map<std::string, size_t> known = {
        {"add", 2}, {"sub", 2}, {"mul", 2}, {"floordiv", 2}, {"truediv", 2}, {"mod", 2}, {"neg", 1},
        {"pow", 2}, {"lt", 2}, {"le", 2}, {"gt", 2}, {"ge", 2}, {"eq", 2}, {"ne", 2}, {"and_", 2},
        {"or_", 2}, {"getitem", 2}, {"abs", 1}, {"pos", 1}, {"ceil", 1}, {"floor", 1}, {"trunc", 1},
        {"sym_max", 2}, {"sym_min", 2}, {"sym_not", 1}, {"sym_float", 1}, {"sym_int", 1},
        {"sym_ite", 3}, {"round", 1}};
    const auto found = known.find(name);
    if (found == known.end()) bad("not something to call: " + quote(name));
    if (step.args.size() != found->second || !step.kwargs.empty())
      bad(name + " takes " + std::to_string(found->second) + " arguments");
  }

  void run(Frame& frame) const override {
    Values a;
    for (const Value& arg : step.args) a.push_back(frame.fill(arg));
    store(frame, step, result(a));
  }

  static double number(const c10::IValue& value) {
    if (value.isInt()) return static_cast<double>(value.toInt());
    if (value.isBool()) return value.toBool();
    if (!value.isDouble()) throw Error("arithmetic of sizes with " + value.tagKind());
    return value.toDouble();
  }

  c10::IValue result(const Values& a) const {
    if (name == "getitem") {
      const int64_t at = a[1].isInt() ? a[1].toInt() : -1;
      const Values parts = a[0].isTuple() ? Values(a[0].toTupleRef().elements().begin(),
                                                   a[0].toTupleRef().elements().end())
          : a[0].isList()                 ? a[0].toListRef().vec()
                                          : Values();
      if (at < 0 || static_cast<size_t>(at) >= parts.size()) throw Error("getitem: there is no such part");
      return parts[at];
    }
    if (name == "sym_ite") return number(a[0]) != 0 ? a[1] : a[2];
    if (name == "sym_not") return number(a[0]) == 0;
    const double x = number(a[0]), y = a.size() > 1 ? number(a[1]) : 0;
    if (name == "lt") return x < y;
    if (name == "le") return x <= y;
    if (name == "gt") return x > y;
    if (name == "ge") return x >= y;
    if (name == "eq") return x == y;
    if (name == "ne") return x != y;
    if (name == "sym_float") return x;
    if (name == "ceil" || name == "floor" || name == "trunc" || name == "sym_int" || name == "round") {
      if (!a[0].isDouble()) return static_cast<int64_t>(x);
      if (name == "ceil") return static_cast<int64_t>(std::ceil(x));
      if (name == "floor") return static_cast<int64_t>(std::floor(x));
      if (name == "round") return static_cast<int64_t>(std::nearbyint(x));
      return static_cast<int64_t>(std::trunc(x));
    }
    if ((name == "floordiv" || name == "truediv" || name == "mod") && y == 0)
      throw Error("a size is divided by 0");
    if (name == "truediv") return x / y;
    const bool whole = !a[0].isDouble() && (a.size() < 2 || !a[1].isDouble());
    if (!whole) {
      if (name == "add") return x + y;
      if (name == "sub") return x - y;
      if (name == "mul") return x * y;
      if (name == "floordiv") return std::floor(x / y);
      if (name == "mod") return x - std::floor(x / y) * y;
      if (name == "pow") return std::pow(x, y);
      if (name == "neg") return -x;
      if (name == "abs") return std::abs(x);
      if (name == "pos") return x;
      return name == "sym_max" ? std::max(x, y) : std::min(x, y);
    }
    const int64_t i = a[0].isBool() ? a[0].toBool() : a[0].toInt();
    const int64_t j = a.size() < 2 ? 0 : a[1].isBool() ? a[1].toBool() : a[1].toInt();
    int64_t made = 0;
    bool over = false;
    if (name == "add") over = __builtin_add_overflow(i, j, &made);
    else if (name == "sub") over = __builtin_sub_overflow(i, j, &made);
    else if (name == "mul") over = __builtin_mul_overflow(i, j, &made);
    else if (name == "neg") over = __builtin_sub_overflow(int64_t{0}, i, &made);
    else if (name == "abs") over = i == INT64_MIN || (made = std::abs(i), false);
    else if (name == "pos") made = i;
    else if (name == "sym_max") made = std::max(i, j);
    else if (name == "sym_min") made = std::min(i, j);
    else if (name == "and_") made = i & j;
    else if (name == "or_") made = i | j;
    else if (name == "pow") {
      const double power = std::pow(x, y);
      over = !(std::abs(power) < 9e18);
      if (!over) made = static_cast<int64_t>(power);
    } else {  // floordiv, mod: Python's, which round down
      over = i == INT64_MIN && j == -1;
      if (!over) {
        const int64_t down = i / j - (i % j != 0 && (i % j < 0) != (j < 0));
        made = name == "floordiv" ? down : i - down * j;
      }
    }
    if (over) throw Error("a size has more than 64 bits");
    if (a[0].isBool() && (name == "and_" || name == "or_")) return made != 0;
    return made;
  }

  const Step& step;
  std::string name;
};

// --- Branches and loops ---

struct Branch {
  std::shared_ptr<Linked> program;
  bool single = false;
  std::vector<bool> dense;
};
using Branches = std::map<int64_t, Branch>;  // by buffer

struct Control : Action {
  Control(const Step& step, const Kernel& kernel, const Branches& branches)
      : step(step), loop(kernel.name == "while_loop") {
    if (kernel.name != "cond" && !loop)
      bad("it calls " + kernel.name + ", which runs in Python only; compile the program without it");
    const size_t first = loop ? 0 : 1;
    if (step.args.size() != 4 || !step.kwargs.empty()) bad(kernel.name + " takes 4 arguments");
    for (size_t i = 0; i < 2; ++i) {
      const Value& arg = step.args[first + i];
      const auto found = branches.find(arg.kind == Value::kBuffer ? arg.buffer : -1);
      if (found == branches.end()) bad(kernel.name + " is given something that is no branch");
      branch[i] = found->second;
    }
  }

  static Values items(const c10::IValue& value) {
    if (value.isTuple()) {
      const auto& parts = value.toTupleRef().elements();
      return Values(parts.begin(), parts.end());
    }
    if (value.isList()) return value.toListRef().vec();
    throw Error("a branch takes a list of values");
  }

  static bool truth(const c10::IValue& value) {
    if (value.isBool()) return value.toBool();
    if (value.isTensor() && value.toTensor().numel() == 1) return value.toTensor().item<bool>();
    throw Error("a branch is decided by " + value.tagKind());
  }

  c10::IValue call(int which, Values operands) const {
    const Branch& taken = branch[which];
    for (size_t i = 0; i < std::min(taken.dense.size(), operands.size()); ++i)
      if (taken.dense[i] && operands[i].isTensor()) operands[i] = operands[i].toTensor().contiguous();
    Values made = taken.program->run(std::move(operands));
    if (!taken.single) return c10::ivalue::Tuple::create(std::move(made));
    if (made.size() != 1) throw Error("a branch gives another number of values");
    return made[0];
  }

  void run(Frame& frame) const override {
    if (!loop) {
      const bool yes = truth(frame.fill(step.args[0]));
      return store(frame, step, call(yes ? 0 : 1, items(frame.fill(step.args[3]))));
    }
    Values carried = items(frame.fill(step.args[2]));
    const Values more = items(frame.fill(step.args[3]));
    const auto all = [&] {
      Values operands = carried;
      operands.insert(operands.end(), more.begin(), more.end());
      return operands;
    };
    while (truth(call(0, all()))) {
      const c10::IValue made = call(1, all());
      carried = branch[1].single ? Values{made} : items(made);
    }
    store(frame, step, c10::ivalue::Tuple::create(std::move(carried)));
  }

  const Step& step;
  bool loop;
  Branch branch[2];
};

// --- Worker threads: a stream of the host ---

class Worker {
 public:
  Worker() : thread_([this] { loop(); }) {}
  ~Worker() {
    submit(nullptr);
    thread_.join();
  }
  void submit(std::function<void()> job) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      jobs_.push_back(std::move(job));
    }
    ready_.notify_one();
  }

 private:
  void loop() {
    while (true) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> hold(lock_);
        ready_.wait(hold, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      if (!job) return;
      job();
    }
  }
  std::mutex lock_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_;
  std::thread thread_;
};

class Runs : public Linked {
 public:
  Runs(const Part& part, const Values& values,
       const std::vector<std::shared_ptr<Linked>>& programs, c10::Device device)
      : plan_(part.plan), device_(device) {
    Branches branches;
    for (const auto& [buffer, name] : plan_.constants) {
      const auto found = part.constants.find(name);
      if (found == part.constants.end()) bad("nothing says what constant " + quote(name) + " is");
      const Constant& constant = found->second;
      if (constant.kind == Constant::kValue)
        constants_.emplace_back(buffer, values.at(constant.index));
      else if (constant.kind == Constant::kProgram)
        branches[buffer] = {programs.at(constant.index), constant.single, constant.dense};
    }
    for (const Step& step : plan_.steps) {
      streams_.insert(step.stream);
      if (step.kind != Step::kLaunch) {
        actions_.push_back(nullptr);
        continue;
      }
      const auto found = part.kernels.find(step.name);
      if (found == part.kernels.end()) bad("nothing says what " + quote(step.name) + " is");
      const Kernel& kernel = found->second;
      switch (kernel.kind) {
        case Kernel::kLibrary: actions_.push_back(std::make_unique<Region>(step, kernel, values)); break;
        case Kernel::kOp: actions_.push_back(std::make_unique<Call>(step, kernel)); break;
        case Kernel::kBuiltin: actions_.push_back(std::make_unique<Builtin>(step, kernel)); break;
        case Kernel::kHigher: actions_.push_back(std::make_unique<Control>(step, kernel, branches));
      }
    }
    streams_.erase(kMain);
    if (streams_.empty()) {
      const auto launches = std::count_if(
          plan_.steps.begin(), plan_.steps.end(), [](const Step& s) { return s.kind == Step::kLaunch; });
      for (const auto& action : actions_)
        if (const auto* region = dynamic_cast<const Region*>(action.get());
            region && launches == 1 && region->is_all_of(plan_))
          only_ = region;
      return;
    }
    prove(plan_);
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      const Step& step = plan_.steps[i];
      by_stream_[step.stream].push_back(i);
      if (step.kind == Step::kRecord || step.kind == Step::kWait) events_.emplace(step.name, events_.size());
    }
    if (device_.type() == c10::kCPU) {
      for (const std::string& name : streams_) workers_[name] = std::make_unique<Worker>();
      return;
    }
    const c10::impl::VirtualGuardImpl guard(device_.type());
    for (const std::string& name : streams_) own_.emplace(name, guard.getStreamFromGlobalPool(device_));
    for (size_t i = 0; i <= events_.size(); ++i) recorded_.emplace_back(device_.type());
    note_owners();
  }

  Values run(Values inputs) override {
    if (inputs.size() != plan_.inputs.size())
      throw Error("a program takes " + std::to_string(plan_.inputs.size()) + " values, got " +
                  std::to_string(inputs.size()));
    c10::OptionalDeviceGuard on;  // generated code reads the current stream of the current device
    if (device_.type() != c10::kCPU) on.reset_device(device_);
    if (only_) return only_->run(std::move(inputs));
    Frame frame(plan_.names.size());
    for (size_t i = 0; i < inputs.size(); ++i) frame.values[plan_.inputs[i]] = std::move(inputs[i]);
    for (const auto& [buffer, value] : constants_) frame.values[buffer] = value;
    if (streams_.empty())
      for (size_t i = 0; i < plan_.steps.size(); ++i) plain_step(frame, i);
    else if (device_.type() == c10::kCPU)
      threaded(frame);
    else
      on_device(frame);
    Values outputs;
    outputs.reserve(plan_.outputs.size());
    for (const Value& out : plan_.outputs) outputs.push_back(frame.fill(out));
    return outputs;
  }

 private:
  void plain_step(Frame& frame, size_t i) const {
    const Step& step = plan_.steps[i];
    if (step.kind == Step::kLaunch) actions_[i]->run(frame);
    else if (step.kind == Step::kFree) frame.values[step.buffer] = {};
  }

  // One call of several streams: its events, and who is done.
  struct Threads {
    explicit Threads(size_t events) : reached(events, false) {}
    std::mutex lock;
    std::condition_variable moved;
    std::vector<bool> reached;
    size_t running = 0;
    std::exception_ptr error;
  };

  void walk(const std::vector<size_t>& steps, Frame& frame, Threads& call) const {
    try {
      for (size_t i : steps) {
        const Step& step = plan_.steps[i];
        if (step.kind == Step::kRecord) {
          std::lock_guard<std::mutex> hold(call.lock);
          call.reached[events_.at(step.name)] = true;
          call.moved.notify_all();
        } else if (step.kind == Step::kWait) {
          std::unique_lock<std::mutex> hold(call.lock);
          const size_t event = events_.at(step.name);
          call.moved.wait(hold, [&] { return call.reached[event] || call.error; });
          if (call.error) return;
        } else {
          plain_step(frame, i);
        }
      }
    } catch (...) {
      std::lock_guard<std::mutex> hold(call.lock);
      if (!call.error) call.error = std::current_exception();
      call.moved.notify_all();
    }
  }

  void threaded(Frame& frame) {
    Threads call(events_.size());
    call.running = workers_.size();
    {
      std::lock_guard<std::mutex> hold(order_);  // every worker sees calls in one order
      for (const auto& [name, worker] : workers_) {
        const std::vector<size_t>& steps = by_stream_.at(name);
        worker->submit([this, &steps, &frame, &call, state = at::ThreadLocalState()] {
          {
            const at::ThreadLocalStateGuard as_the_caller(state);  // inference mode and the like
            walk(steps, frame, call);
          }
          std::lock_guard<std::mutex> done(call.lock);
          --call.running;
          call.moved.notify_all();
        });
      }
    }
    if (const auto found = by_stream_.find(kMain); found != by_stream_.end())
      walk(found->second, frame, call);
    std::unique_lock<std::mutex> hold(call.lock);
    call.moved.wait(hold, [&] { return call.running == 0; });
    if (call.error) std::rethrow_exception(call.error);
  }

  // Which buffers outlive the steps of the stream that made them, and which of those are results.
  void note_owners() {
    std::map<int64_t, int64_t> roots;
    for (const auto& [view, base] : plan_.shared) roots[view] = roots.count(base) ? roots[base] : base;
    std::map<int64_t, std::string> made_on;
    for (const Step& step : plan_.steps) {
      if (step.kind == Step::kLaunch)
        for (int64_t out : step.outputs) made_on[out] = step.stream;
      if (step.kind != Step::kFree) continue;
      const auto root = roots.find(step.buffer);
      const auto maker = made_on.find(root == roots.end() ? step.buffer : root->second);
      if (maker != made_on.end() && maker->second != kMain && maker->second != step.stream)
        late_.insert(step.buffer);
    }
    for (const Value& out : plan_.outputs)
      out.each_buffer([&](int64_t buffer) {
        const auto maker = made_on.find(buffer);
        if (maker != made_on.end() && maker->second != kMain) foreign_.insert(buffer);
      });
  }

  // Calls are enqueued one after the other. A device's allocator gives freed memory to the stream
  // that it was made on, which others in the process may use too: what outlives the steps of its
  // stream is kept until that stream waits for the end of the call.
  void on_device(Frame& frame) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const c10::Stream current = guard.getStream(device_);
    const bool capturing = is_capturing(current);
    std::lock_guard<std::mutex> hold(order_);
    c10::Event& end = recorded_.back();
    const auto join = [&] {
      end.record(current);
      for (const auto& [name, stream] : own_) end.block(stream);
    };
    try {
      enqueue(frame, current);
    } catch (...) {  // the caller's stream must not pass what is under way
      if (capturing) throw;
      for (const auto& [name, stream] : own_) {
        end.record(stream);
        end.block(current);
      }
      join();
      throw;
    }
    if (capturing) return;
    join();
    for (int64_t buffer : foreign_)  // the caller's to free
      if (frame.values[buffer].isTensor()) frame.values[buffer].toTensor().record_stream(current);
  }

  void enqueue(Frame& frame, const c10::Stream& current) {
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      const Step& step = plan_.steps[i];
      const auto found = own_.find(step.stream);
      const c10::Stream stream = found == own_.end() ? current : found->second;
      if (step.kind == Step::kRecord) {
        recorded_[events_.at(step.name)].record(stream);
      } else if (step.kind == Step::kWait) {
        recorded_[events_.at(step.name)].block(stream);
      } else if (step.kind == Step::kLaunch || !late_.count(step.buffer)) {
        const c10::StreamGuard on(stream);
        plain_step(frame, i);
      }
    }
  }

  Plan plan_;
  c10::Device device_;
  std::vector<std::unique_ptr<Action>> actions_;
  const Region* only_ = nullptr;  // where the plan is one call
  std::vector<std::pair<int64_t, c10::IValue>> constants_;
  std::set<std::string> streams_;
  std::map<std::string, std::vector<size_t>> by_stream_;
  std::map<std::string, size_t> events_;
  std::mutex order_;
  std::map<std::string, c10::Stream> own_;  // of a device
  std::vector<c10::Event> recorded_;        // and its events; the last is the end of a call
  std::set<int64_t> late_, foreign_;
  std::map<std::string, std::unique_ptr<Worker>> workers_;  // last: they end before what they use
};

}  // namespace

std::shared_ptr<Linked> link(
    const Part& part, const Values& values, const std::vector<std::shared_ptr<Linked>>& programs,
    c10::Device device) {
  return std::make_shared<Runs>(part, values, programs, device);
}

}  // namespace torchgraft
