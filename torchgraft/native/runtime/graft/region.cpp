// Generated code: libraries that AOTInductor made.
#include <ATen/Context.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include "graft/action.h"

namespace torchgraft {
namespace {

constexpr size_t kContexts = 4;  // calls of one CPU region at the same time; the others wait

struct Library : Region {
  Library(const Step& step, const Kernel& kernel, const Values& values)
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
        at::globalContext().lazyInitDevice(kernel.device.type());  // a library takes memory at once
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
  ~Library() override {
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

  bool is_all_of(const Plan& plan) const override {
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

  std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) const override {
    if (inputs.size() != step.args.size())
      throw Error("a program takes " + std::to_string(step.args.size()) + " values, got " +
                  std::to_string(inputs.size()));
    std::vector<at::Tensor> made = launch(inputs);
    if (made.size() != step.outputs.size())
      throw Error("a region gave " + std::to_string(made.size()) + " values where the plan has " +
                  std::to_string(step.outputs.size()));
    return made;
  }

  const Step& step;
  std::vector<bool> ints, int_outputs;
  std::unordered_map<std::string, at::Tensor> constants;  // of tensors of their own: aliases
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner;
  std::unique_ptr<std::mutex> turn;  // on a device: one call enqueues at a time
};

}  // namespace

std::unique_ptr<Region> call_region(const Step& step, const Kernel& kernel, const Values& values) {
  return std::make_unique<Library>(step, kernel, values);
}

}  // namespace torchgraft
