// Compiling in a C++ program: `torch_aie::torchscript::compile(module, spec)`.
//
// A Python does the compiling: the process's own, or one that is started inside it, from what
// TORCHGRAFT_PYTHON names (else the one that the linked torch was installed for, else `python3` on the
// path). The compiled module runs without it.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/script.h>

#include "ascendie.h"

namespace torch_aie {

using DataType = AscendIE::DataType;
using TensorFormat = AscendIE::TensorFormat;
enum class PrecisionPolicy { PREF_FP32 = 0, FP16 = 1, FP32 = 2, PREF_FP16 = 3 };

// The device that is used from now on; where there is one NPU (or none, and torch runs it), 0.
void set_device(int32_t id);
// Lets go of every program that compiled modules hold in this process.
void finalize();

// An input by its type: a shape, or a range of shapes (-1 in both: any size).
class Input {
 public:
  explicit Input(std::vector<int64_t> shape, TensorFormat format = TensorFormat::ND);
  Input(std::vector<int64_t> shape, DataType type, TensorFormat format = TensorFormat::ND);
  Input(std::vector<int64_t> min, std::vector<int64_t> max, TensorFormat format = TensorFormat::ND);
  Input(std::vector<int64_t> min, std::vector<int64_t> max, DataType type,
        TensorFormat format = TensorFormat::ND);
  // A bool and nothing else: of one size, `Input({5})` is a shape.
  template <typename T, std::enable_if_t<std::is_same_v<T, bool>, int> = 0>
  explicit Input(T isShapeRange) : range(isShapeRange) {}

  bool IsShapeRange() const { return range; }

  std::vector<int64_t> shape, minShape, maxShape;
  DataType dtype = DataType::FLOAT;
  TensorFormat format = TensorFormat::ND;

 private:
  bool range = false;
};

namespace torchscript {

struct CompileSpec {
  CompileSpec(std::vector<Input> inputs) : inputs{std::move(inputs)} {}
  // Gears: several sets of shapes, each of which gets a program of its own.
  CompileSpec(std::vector<std::vector<Input>> gears) : inputs(std::move(gears)) {}

  std::vector<std::vector<Input>> inputs;
  PrecisionPolicy precision_policy = PrecisionPolicy::FP16;
  std::string soc_version = "Ascend310P3";
  int64_t minBlockSize = 1;
  int64_t optimizationLevel = 0;
  std::vector<int64_t> defaultBufferSizeVec = {500};
  bool requireFullCompilation = false;
  bool truncateLongAndDouble = true;
  bool allowTensorReplaceInt = false;
  std::vector<std::string> torchExecutedOps;
  std::vector<std::string> torchExecutedModules;
};

// The module, compiled: `forward` runs in C++. Raises `std::exception`s with a sentence.
torch::jit::Module compile(const torch::jit::Module& module, const CompileSpec& spec);
// The bytes of a compiled program (a package, see torchgraft/torchgraft.h).
std::string export_engine(
    const torch::jit::Module& module, const std::string& method_name, const CompileSpec& spec);

}  // namespace torchscript
}  // namespace torch_aie
