// A compiled ScriptModule holds its package in a buffer, and calls an operator to run it.
#include "graft/engine.h"

#include <mutex>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "torchgraft/torchgraft.h"

namespace torchgraft {
namespace {

struct Engines {
  std::mutex lock;
  struct Held {
    c10::weak_intrusive_ptr<c10::TensorImpl> buffer;
    Program program;
  };
  std::unordered_map<const void*, Held> programs;  // by buffer
};
Engines& engines() {
  static auto* made = new Engines;
  return *made;
}

Program program_of(const at::Tensor& engine) {
  const void* key = engine.unsafeGetTensorImpl();
  {
    std::lock_guard<std::mutex> hold(engines().lock);
    const auto found = engines().programs.find(key);
    if (found != engines().programs.end() && !found->second.buffer.expired()) return found->second.program;
  }
  Program loaded = load(engine.cpu());  // the module may have been moved to a device
  std::lock_guard<std::mutex> hold(engines().lock);
  for (auto it = engines().programs.begin(); it != engines().programs.end();)
    it = it->second.buffer.expired() ? engines().programs.erase(it) : std::next(it);
  engines().programs.insert_or_assign(
      key, Engines::Held{c10::weak_intrusive_ptr<c10::TensorImpl>(engine.getIntrusivePtr()), loaded});
  return loaded;
}

std::vector<at::Tensor> run_engine(std::vector<at::Tensor> inputs, const at::Tensor& engine) {
  return program_of(engine).forward(inputs);
}

// Python defines the first operator too, where it comes first; then this is its kernel for devices.
struct Registered {
  Registered() {
    static std::vector<std::unique_ptr<torch::Library>> kept;
    const bool defined =
        c10::Dispatcher::singleton().findSchema({"torchgraft::run_engine", ""}).has_value();
    kept.push_back(std::make_unique<torch::Library>(
        torch::Library::FRAGMENT, "torchgraft", std::nullopt, __FILE__, __LINE__));
    if (!defined) kept.back()->def("run_engine(Tensor[] inputs, Tensor engine) -> Tensor[]");
    kept.back()->def("forget_engines() -> int", &forget_engines);
    using Key = c10::DispatchKey;  // a program may take sparse tensors, too
    for (const auto key : {Key::CPU, Key::CUDA, Key::PrivateUse1, Key::SparseCPU, Key::SparseCUDA,
                           Key::SparseCsrCPU, Key::SparseCsrCUDA}) {
      kept.push_back(std::make_unique<torch::Library>(
          torch::Library::IMPL, "torchgraft", key, __FILE__, __LINE__));
      kept.back()->impl("run_engine", TORCH_FN(run_engine));
    }
  }
} registered;

}  // namespace

int64_t forget_engines() {
  std::unordered_map<const void*, Engines::Held> gone;  // they go when nobody waits for the lock
  std::lock_guard<std::mutex> hold(engines().lock);
  gone.swap(engines().programs);
  return static_cast<int64_t>(gone.size());
}

}  // namespace torchgraft
