// Saved programs in C++: no Python in the process.
//
//   auto program = torchgraft::load("model.graft");
//   std::vector<at::Tensor> outputs = program.forward({x});
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchgraft {

// Every error that is raised on purpose; its text says what is wrong and what to do.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct BadPackage : Error { using Error::Error; };      // not a package, or altered
struct WrongMachine : Error { using Error::Error; };    // made for another torch, device, processor
struct MissingLibrary : Error { using Error::Error; };  // calls operators that nobody registered
struct InputMismatch : Error { using Error::Error; };   // a call that does not fit
struct WeightMismatch : Error { using Error::Error; };  // other weights than the program's
struct BadPlan : Error { using Error::Error; };         // a plan that cannot run
struct UnorderedUse : Error { using Error::Error; };    // a plan that could race

// The version of torch that this library was built against.
const char* torch_version();

using Weights = std::unordered_map<std::string, at::Tensor>;

struct Options {
  std::optional<c10::Device> device;   // among those of the kind it was compiled for
  std::optional<std::string> sha256;   // the file must have this hash
  std::optional<Weights> weights;      // used instead of the file's
};

struct Loader;

// A program. Copies share one program; calls from several threads are safe. One that nothing was
// assigned to is empty: using it raises.
class Program {
 public:
  // Its tensors in, in order; its results out, in order. No gradients are recorded.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) const;

  // The call as Python has it: nested arguments, and results with their structure.
  c10::IValue operator()(
      const std::vector<c10::IValue>& args,
      const std::unordered_map<std::string, c10::IValue>& kwargs = {}) const;

  const std::string& name() const;
  // Where it runs; its inputs lie there.
  c10::Device device() const;
  // The names of its tensor inputs.
  std::vector<std::string> inputs() const;
  // What a call takes, one line for each declared shape.
  std::string signature() const;
  // What did not go as its mode asks, such as why it is not captured as a CUDA graph. Capture is at
  // the first call of a shape, so ask after one.
  std::vector<std::string> notes() const;
  // New weights from the next call on; all of them, or nothing changes.
  void load_state_dict(const Weights& weights);

  struct Body;

 private:
  friend struct Loader;
  Body& body() const;
  std::shared_ptr<Body> body_;
};

// The program that `compiled.save(path)` wrote. Everything in the file is checked against its
// manifest, weights stay in the file. It holds machine code: load files that you trust.
Program load(const std::string& path, const Options& options = {});
// The same from the bytes of such a file (uint8), which are not copied.
Program load(const at::Tensor& bytes, const Options& options = {});

}  // namespace torchgraft
