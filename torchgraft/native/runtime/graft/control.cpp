// Branches and loops.
#include "graft/action.h"

namespace torchgraft {
namespace {

struct Control : Action {
  Control(const Step& step, const Kernel& kernel, const std::map<int64_t, Branch>& branches)
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
    if (auto parts = parts_of(value)) return std::move(*parts);
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

}  // namespace

std::unique_ptr<Action> call_control(const Step& step, const Kernel& kernel, const Callees& callees) {
  return std::make_unique<Control>(step, kernel, callees.branches);
}

}  // namespace torchgraft
