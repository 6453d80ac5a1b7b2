// The network that a converter builds. A layer becomes calls of torch operators in the graph that is
// being compiled; it is written there when its outputs are first looked at, or when the converter
// is done, so its setters must be called before that.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/script.h>

namespace AscendIE {

enum class DataType {
  FLOAT, FLOAT16, INT8, INT32, UINT8, INT16, UINT16, UINT32, INT64, UINT64, DOUBLE, BOOL, STRING,
  UNKNOWN
};
enum class TensorFormat { ND, NCHW, NHWC, UNKNOWN };

// Both raise where the other side has no such type.
at::ScalarType toScalarType(DataType type);
DataType toDataType(at::ScalarType type);

enum class ActivationKind {
  RELU, RELU6, SIGMOID, TANH, LEAKY_RELU, ELU, SELU, SOFTPLUS, SOFTSIGN, GELU, SILU, MISH,
  HARD_SIGMOID, HARD_SWISH, CLIP
};
enum class ElementWiseOperation {
  ADD, SUB, MUL, DIV, FLOOR_DIV, MAX, MIN, POW, MOD, EQUAL, GREATER, LESS, AND, OR, XOR
};
enum class UnaryOperation {
  EXP, LOG, SQRT, RECIPROCAL, ABS, NEG, SIN, COS, TAN, CEIL, FLOOR, ROUND, ERF, NOT, SIGN
};
enum class ReduceOperation { SUM, PROD, MAX, MIN, MEAN };
enum class MatrixOperation { NONE, TRANSPOSE, VECTOR };
enum class PoolingType { MAX, AVERAGE };

// Sizes of a tensor, or of a window. A size that is known at run time only is -1.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> sizes) : sizes_(sizes) {}
  explicit Dims(std::vector<int64_t> sizes) : sizes_(std::move(sizes)) {}

  int64_t Size() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t operator[](int64_t i) const { return sizes_.at(static_cast<size_t>(i)); }
  int64_t& operator[](int64_t i) { return sizes_.at(static_cast<size_t>(i)); }
  const std::vector<int64_t>& Vector() const { return sizes_; }
  bool IsStatic() const;
  bool operator==(const Dims& other) const { return sizes_ == other.sizes_; }

 private:
  std::vector<int64_t> sizes_;
};

class Layer;
class Network;

// A value of the network. It belongs to the network, as layers do.
class Tensor {
 public:
  Dims GetDimensions();
  DataType GetType();
  DataType GetDataType() { return GetType(); }
  at::ScalarType GetScalarType();
  const char* GetName() const { return name_.c_str(); }
  void SetName(const char* name) { name_ = name; }

 private:
  friend class Layer;
  friend class Network;
  Layer* producer_ = nullptr;  // none for what the graph had before
  size_t index_ = 0;
  int64_t id_ = -1;  // in the graph; -1 until the producer is built
  std::vector<int64_t> shape_;
  at::ScalarType type_ = at::ScalarType::Undefined;
  std::string name_;
};

// Numbers known at compile time.
class WeightsBuf {
 public:
  WeightsBuf() = default;  // none
  WeightsBuf(at::Tensor values) : values_(std::move(values)) {}
  // Copies them.
  WeightsBuf(const void* values, DataType type, int64_t count);
  bool empty() const { return !values_.defined(); }
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
};

// What an operator is called with: a tensor, several, or anything else that it takes.
struct Argument {
  Argument(Tensor* tensor) : tensors{tensor}, kind(kTensor) {}
  Argument(std::vector<Tensor*> list) : tensors(std::move(list)), kind(kList) {}
  Argument(const Dims& dims) : value(dims.Vector()), kind(kValue) {}
  Argument(at::ScalarType type) : value(static_cast<int64_t>(type)), kind(kType) {}
  template <typename T>
  Argument(T plain) : value(std::move(plain)), kind(kValue) {}

  std::vector<Tensor*> tensors;
  c10::IValue value;
  enum { kTensor, kList, kValue, kType } kind;
};
using Attributes = std::vector<std::pair<std::string, Argument>>;

// Writes one call into the graph that is being compiled. What runs the converter provides it.
class Graph {
 public:
  struct Made {
    int64_t id;
    std::vector<int64_t> shape;
    at::ScalarType type;
  };
  virtual ~Graph() = default;
  virtual std::vector<Made> Call(
      const std::string& op, const std::vector<Argument>& args, const Attributes& named) = 0;
  virtual Made Constant(const at::Tensor& values) = 0;
};

class Layer {
 public:
  using Build = std::function<std::vector<Tensor*>(Network&)>;

  virtual ~Layer() = default;
  void SetName(const char* name) { name_ = name; }
  const char* GetName() const { return name_.c_str(); }
  Tensor* GetOutput(int64_t index = 0);
  // Builds the layer: how many there are is the operator's to say.
  int64_t GetOutputNum();
  Tensor* GetInput(int64_t index) const { return inputs_.at(static_cast<size_t>(index)); }
  int64_t GetInputNum() const { return static_cast<int64_t>(inputs_.size()); }

 protected:
  friend class Network;
  friend class Tensor;
  virtual std::vector<Tensor*> Lower(Network& net) = 0;
  void Open() const;  // raises once the layer is built
  const std::vector<Tensor*>& Built();

  Network* net_ = nullptr;
  std::vector<Tensor*> inputs_;
  std::string name_, kind_;
  bool built_ = false;
  std::vector<Tensor*> made_;
  std::vector<std::unique_ptr<Tensor>> promised_;  // given out before the layer was built
};

// A setter and a getter for each property, with the check that the layer is open.
#define TORCHGRAFT_PROPERTY(Type, Name, initial)                          \
 public:                                                                  \
  void Set##Name(Type value) { Open(); Name##_ = std::move(value); }      \
  const Type& Get##Name() const { return Name##_; }                       \
 private:                                                                 \
  Type Name##_ = initial;

class ActivationLayer : public Layer {
  TORCHGRAFT_PROPERTY(ActivationKind, Kind, ActivationKind::RELU)
  TORCHGRAFT_PROPERTY(double, Alpha, 0.0)  // slope, or lower bound
  TORCHGRAFT_PROPERTY(double, Beta, 0.0)   // upper bound, or offset
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class ConstantLayer : public Layer {
  at::Tensor values_;
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

// Weights are [out, in / groups, *kernel]; transposed ones are [in, out / groups, *kernel].
class ConvolutionLayer : public Layer {
  TORCHGRAFT_PROPERTY(Dims, Strides, Dims())
  TORCHGRAFT_PROPERTY(Dims, Paddings, Dims())
  TORCHGRAFT_PROPERTY(Dims, Dilations, Dims())
  TORCHGRAFT_PROPERTY(Dims, OutputPaddings, Dims())
  TORCHGRAFT_PROPERTY(int64_t, GroupNum, 1)
  TORCHGRAFT_PROPERTY(bool, Transposed, false)
  Tensor *weight_ = nullptr, *bias_ = nullptr;
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class ElementWiseLayer : public Layer {
  TORCHGRAFT_PROPERTY(ElementWiseOperation, Operation, ElementWiseOperation::ADD)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class UnaryLayer : public Layer {
  TORCHGRAFT_PROPERTY(UnaryOperation, Operation, UnaryOperation::EXP)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class MatrixMultiplyLayer : public Layer {
  TORCHGRAFT_PROPERTY(MatrixOperation, First, MatrixOperation::NONE)
  TORCHGRAFT_PROPERTY(MatrixOperation, Second, MatrixOperation::NONE)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class PoolingLayer : public Layer {
  TORCHGRAFT_PROPERTY(PoolingType, Type, PoolingType::MAX)
  TORCHGRAFT_PROPERTY(Dims, WindowSize, Dims())
  TORCHGRAFT_PROPERTY(Dims, Strides, Dims())  // the window's size unless set
  TORCHGRAFT_PROPERTY(Dims, Paddings, Dims())
  TORCHGRAFT_PROPERTY(bool, CeilMode, false)
  TORCHGRAFT_PROPERTY(bool, CountIncludePad, true)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class ReduceLayer : public Layer {
  TORCHGRAFT_PROPERTY(ReduceOperation, Operation, ReduceOperation::SUM)
  TORCHGRAFT_PROPERTY(std::vector<int64_t>, Axes, {})  // all of them where empty
  TORCHGRAFT_PROPERTY(bool, KeepDims, false)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

// A permutation, then a new shape (0: as it was, -1: the rest), then a second permutation.
class ShuffleLayer : public Layer {
  TORCHGRAFT_PROPERTY(std::vector<int64_t>, FirstTranspose, {})
  TORCHGRAFT_PROPERTY(std::vector<int64_t>, SecondTranspose, {})
  bool reshape_ = false;
  Dims shape_;
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;

 public:
  void SetReshapeDimensions(Dims shape) { Open(); shape_ = std::move(shape); reshape_ = true; }
};

// The sizes as an int64 tensor.
class ShapeLayer : public Layer {
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class ClipLayer : public Layer {
  TORCHGRAFT_PROPERTY(double, Min, 0.0)
  TORCHGRAFT_PROPERTY(double, Max, 0.0)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

// round(x * scale + offset), within the range of the output type.
class QuantizeLayer : public Layer {
  TORCHGRAFT_PROPERTY(double, Scale, 1.0)
  TORCHGRAFT_PROPERTY(double, Offset, 0.0)
  TORCHGRAFT_PROPERTY(DataType, OutputType, DataType::INT8)  // or UINT8
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

// (x - offset) / scale: what a quantize layer with the same numbers started from.
class DequantizeLayer : public Layer {
  TORCHGRAFT_PROPERTY(double, Scale, 1.0)
  TORCHGRAFT_PROPERTY(double, Offset, 0.0)
  TORCHGRAFT_PROPERTY(DataType, OutputType, DataType::FLOAT)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class CumsumLayer : public Layer {
  TORCHGRAFT_PROPERTY(int64_t, Axis, 0)
  TORCHGRAFT_PROPERTY(bool, Exclusive, false)  // each sum without its own element
  TORCHGRAFT_PROPERTY(bool, Reverse, false)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class SoftmaxLayer : public Layer {
  TORCHGRAFT_PROPERTY(int64_t, Axis, -1)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class ConcatLayer : public Layer {
  TORCHGRAFT_PROPERTY(int64_t, Axis, 0)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class SliceLayer : public Layer {
  TORCHGRAFT_PROPERTY(Dims, Start, Dims())
  TORCHGRAFT_PROPERTY(Dims, Lengths, Dims())  // -1: to the end
  TORCHGRAFT_PROPERTY(Dims, Strides, Dims())
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

// Takes along one axis; indices of any rank.
class GatherLayer : public Layer {
  TORCHGRAFT_PROPERTY(int64_t, Axis, 0)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

class CastLayer : public Layer {
  TORCHGRAFT_PROPERTY(DataType, ToType, DataType::FLOAT)
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

// Any operator of torch.
class OperatorLayer : public Layer {
  std::string op_;
  std::vector<Argument> args_;
  Attributes named_;
  friend class Network;
  std::vector<Tensor*> Lower(Network& net) override;
};

#undef TORCHGRAFT_PROPERTY

class Network {
 public:
  explicit Network(Graph& graph) : graph_(graph) {}
  Network(const Network&) = delete;

  // Each layer under its name and under that with `Layer`, with the same parameters.
#define TORCHGRAFT_LAYER(Name, parameters, arguments) \
  Name##Layer* Add##Name parameters;                  \
  Name##Layer* Add##Name##Layer parameters { return Add##Name arguments; }
  TORCHGRAFT_LAYER(Activation, (Tensor * x, ActivationKind kind), (x, kind))
  TORCHGRAFT_LAYER(Constant, (const at::Tensor& values), (values))
  TORCHGRAFT_LAYER(Constant, (const Dims& dims, const WeightsBuf& values), (dims, values))
  TORCHGRAFT_LAYER(Convolution, (Tensor * x, Tensor* weight, Tensor* bias = nullptr), (x, weight, bias))
  TORCHGRAFT_LAYER(
      Convolution,
      (Tensor * x, int64_t outputs, const Dims& kernel, const WeightsBuf& weight,
       const WeightsBuf& bias = {}),
      (x, outputs, kernel, weight, bias))
  TORCHGRAFT_LAYER(ElementWise, (Tensor * a, Tensor* b, ElementWiseOperation operation), (a, b, operation))
  TORCHGRAFT_LAYER(Unary, (Tensor * x, UnaryOperation operation), (x, operation))
  TORCHGRAFT_LAYER(
      MatrixMultiply, (Tensor * a, MatrixOperation first, Tensor* b, MatrixOperation second),
      (a, first, b, second))
  TORCHGRAFT_LAYER(Pooling, (Tensor * x, PoolingType type, const Dims& window), (x, type, window))
  TORCHGRAFT_LAYER(
      Reduce,
      (Tensor * x, ReduceOperation operation, const std::vector<int64_t>& axes, bool keepDims),
      (x, operation, axes, keepDims))
  TORCHGRAFT_LAYER(Shuffle, (Tensor * x), (x))
  TORCHGRAFT_LAYER(Shape, (Tensor * x), (x))
  TORCHGRAFT_LAYER(Clip, (Tensor * x, double min, double max), (x, min, max))
  TORCHGRAFT_LAYER(Quantize, (Tensor * x, double scale), (x, scale))
  TORCHGRAFT_LAYER(Dequantize, (Tensor * x, double scale), (x, scale))
  TORCHGRAFT_LAYER(Cumsum, (Tensor * x, int64_t axis), (x, axis))
  TORCHGRAFT_LAYER(Softmax, (Tensor * x, int64_t axis = -1), (x, axis))
  TORCHGRAFT_LAYER(Concat, (const std::vector<Tensor*>& xs, int64_t axis), (xs, axis))
  TORCHGRAFT_LAYER(
      Slice, (Tensor * x, const Dims& start, const Dims& lengths, const Dims& strides = {}),
      (x, start, lengths, strides))
  TORCHGRAFT_LAYER(Gather, (Tensor * x, Tensor* indices, int64_t axis), (x, indices, axis))
  TORCHGRAFT_LAYER(Cast, (Tensor * x, DataType type), (x, type))
#undef TORCHGRAFT_LAYER

  // Any operator, by name ("ns::op" or "ns::op.overload"): its inputs (tensors, or whatever stands
  // in their place), and its attributes by name.
  OperatorLayer* AddLayer(
      const std::string& op, std::vector<Argument> inputs, Attributes attributes = {});
  template <typename T, typename = std::enable_if_t<std::is_same_v<T, Tensor*>>>
  OperatorLayer* AddLayer(
      const std::string& op, const std::vector<T>& inputs, Attributes attributes = {}) {
    return AddLayer(
        op, std::vector<Argument>(inputs.begin(), inputs.end()), std::move(attributes));
  }

  // The tensors that the converted call takes, and what will stand for its results.
  int64_t GetInputNum() const { return static_cast<int64_t>(inputs_.size()); }
  Tensor* GetInput(int64_t index) const { return inputs_.at(static_cast<size_t>(index)); }
  int64_t GetOutputNum() const { return static_cast<int64_t>(outputs_.size()); }
  Tensor* GetOutput(int64_t index) const { return outputs_.at(static_cast<size_t>(index)); }
  void SetAsOutput(Tensor* tensor) { outputs_.push_back(tensor); }
  // Raises: a converter's inputs are those of the call.
  Tensor* AddInput(const char* name, DataType type, const Dims& dims);

  // For what runs converters, and for layers.
  Tensor* Given(const Graph::Made& made, bool input);
  int64_t Id(Tensor* tensor);
  std::vector<Tensor*> Call(
      const std::string& op, std::vector<Argument> args, Attributes named = {});
  Tensor* One(const std::string& op, std::vector<Argument> args, Attributes named = {});

 private:
  friend class ConstantLayer;
  template <typename L>
  L* Add(const char* kind, std::vector<Tensor*> inputs);

  Graph& graph_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<Tensor*> inputs_, outputs_;
};

}  // namespace AscendIE
