// What a converter holds: the call's arguments as `Var`s, and the context that takes its results.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <torch/script.h>

#include "ascendie.h"

namespace torch_aie::core::conversion {

struct ConversionCtx;

// An argument of the call: a tensor of the graph, or a value known at compile time (a weight is
// both). Each `unwrapTo` raises where the value is another one; that refuses the call.
class Var {
 public:
  Var() = default;
  Var(AscendIE::Tensor* tensor) : tensor_(tensor) {}
  Var(c10::IValue value) : value_(std::move(value)), known_(true) {}
  Var(AscendIE::Tensor* tensor, c10::IValue value)
      : tensor_(tensor), value_(std::move(value)), known_(true) {}
  // A value that is computed while the program runs.
  static Var unknown(std::string why);

  bool isAscendTensor() const { return tensor_ != nullptr; }
  bool isITensor() const { return isAscendTensor(); }
  bool isIValue() const { return known_; }
  bool isNone() const { return known_ && value_.isNone(); }

  // The tensor of the graph; raises where there is none.
  AscendIE::Tensor* getAscendTensor() const;
  // The same; a value known at compile time becomes a constant of the network.
  AscendIE::Tensor* getFreezeAscendTensor(ConversionCtx* ctx);
  const c10::IValue& getIValue() const;

  // A number comes as a tensor without dimensions, float64 or int64, as TorchScript has it.
  at::Tensor unwrapToAtTensor() const;
  at::Tensor unwrapToAtTensor(at::Tensor otherwise) const;
  int64_t unwrapToInt() const;
  int64_t unwrapToInt(int64_t otherwise) const;
  double unwrapToDouble() const;
  double unwrapToDouble(double otherwise) const;
  bool unwrapToBool() const;
  bool unwrapToBool(bool otherwise) const;
  at::Scalar unwrapToScalar() const;
  at::Scalar unwrapToScalar(at::Scalar otherwise) const;
  std::string unwrapToString() const;
  std::string unwrapToString(std::string otherwise) const;
  at::ScalarType unwrapToScalarType() const;
  at::ScalarType unwrapToScalarType(at::ScalarType otherwise) const;
  std::vector<int64_t> unwrapToIntVector() const;
  std::vector<int64_t> unwrapToIntVector(std::vector<int64_t> otherwise) const;
  std::vector<double> unwrapToDoubleVector() const;
  std::vector<bool> unwrapToBoolVector() const;
  // Of a list of tensors.
  std::vector<AscendIE::Tensor*> getAscendTensors(ConversionCtx* ctx);

  std::string type_name() const;

 private:
  friend struct Session;
  [[noreturn]] void mismatch(const char* wanted) const;

  AscendIE::Tensor* tensor_ = nullptr;
  c10::IValue value_;
  bool known_ = false;
  std::string why_;
  std::vector<Var> items_;  // of a list that holds tensors of the graph
};

struct ConversionCtx {
  AscendIE::Network* net = nullptr;

  // Let a tensor stand for a result of the call. Returns the tensor.
  AscendIE::Tensor* AssociateValueAndVar(const torch::jit::Value* value, Var var);
  AscendIE::Tensor* AssociateValueAndTensor(
      const torch::jit::Value* value, AscendIE::Tensor* tensor);

  std::map<const torch::jit::Value*, AscendIE::Tensor*> results;
};

namespace converters {
using args = std::vector<Var>;
}  // namespace converters

using OpConverter =
    std::function<bool(ConversionCtx*, const torch::jit::Node*, converters::args&)>;

}  // namespace torch_aie::core::conversion
