// A plan with its kernels and constants: something that runs.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include <ATen/core/stack.h>

#include "graft/plan.h"

namespace torchgraft {

class Linked;
struct Region;

// What an entry of `kernels` is, before it is bound to values.
struct Kernel {
  enum Kind { kLibrary, kOp, kBuiltin, kHigher } kind;
  std::string name, overload;
  std::string path;  // of the library
  c10::Device device = c10::kCPU;
  std::vector<std::pair<std::string, int64_t>> constants;
  std::vector<bool> ints, int_outputs;
};

struct Constant {
  enum Kind { kValue, kProgram, kOp } kind;
  int64_t index = -1;
  bool single = false;       // of a branch: it gives one value, not a tuple
  std::vector<bool> dense;   // of a branch: operands that it wants contiguous
  Kernel callee;             // of an operator
};

// An entry of `programs`.
struct Part {
  Plan plan;
  std::map<std::string, Kernel> kernels;
  std::map<std::string, Constant> constants;
};

// An entry of `programs`, the `number`th, of a package with so many values. `libraries` says where
// each member was unpacked.
Part parse_part(
    const json& data, size_t number, size_t values, const Place& place,
    const std::map<std::string, std::string>& libraries);

// Raises `BadPackage` where a launch does not fit what it calls.
std::shared_ptr<Linked> link(
    const Part& part, const Values& values, const std::vector<std::shared_ptr<Linked>>& programs,
    c10::Device device);

class Linked {
 public:
  virtual ~Linked() = default;
  // Thread-safe. Takes the inputs of the plan, gives its outputs.
  virtual Values run(Values inputs) = 0;
  // Where it is generated code for the CPU and nothing else: that, to be called without `Values`.
  virtual const Region* region() const { return nullptr; }
};

}  // namespace torchgraft
