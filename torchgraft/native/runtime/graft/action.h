// What a launch of a plan does.
#pragma once

#include "graft/link.h"

namespace torchgraft {

// The values of one call, by buffer.
struct Frame {
  explicit Frame(size_t buffers) : values(buffers) {}
  c10::IValue fill(const Value& value) const;
  Values values;
};

struct Action {
  virtual ~Action() = default;
  virtual void run(Frame& frame) const = 0;
};

// A program that a launch is given, and how it wants its operands.
struct Branch {
  std::shared_ptr<Linked> program;
  bool single = false;
  std::vector<bool> dense;
};

// What the buffers of a plan's constants stand for where they are no values.
struct Callees {
  std::map<int64_t, Branch> branches;
  std::map<int64_t, Kernel> operators;
};

// Each raises `BadPackage` where the launch does not fit what it calls. The step must stay.
std::unique_ptr<Action> call_operator(const Step& step, const Kernel& kernel);
std::unique_ptr<Action> call_builtin(const Step& step, const Kernel& kernel);
std::unique_ptr<Action> call_mutation(const Step& step, const Callees& callees);
std::unique_ptr<Action> call_control(const Step& step, const Kernel& kernel, const Callees& callees);

// Generated code.
struct Region : Action {
  virtual bool is_all_of(const Plan& plan) const = 0;  // and nothing else is in the plan
  // The call of such a plan.
  virtual std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) const = 0;
  Values call(Values inputs) const;
};
std::unique_ptr<Region> call_region(const Step& step, const Kernel& kernel, const Values& values);

// Puts what a launch gave into its buffers.
void store(Frame& frame, const Step& step, c10::IValue result);

}  // namespace torchgraft
