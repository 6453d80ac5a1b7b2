// Layers as calls of torch operators.
#include <sstream>
#include <stdexcept>

#include "ascendie.h"

namespace AscendIE {

namespace {

constexpr at::ScalarType kUndefined = at::ScalarType::Undefined;

const std::vector<std::pair<DataType, at::ScalarType>>& types() {
  static const std::vector<std::pair<DataType, at::ScalarType>> table = {
      {DataType::FLOAT, at::kFloat},     {DataType::FLOAT16, at::kHalf},
      {DataType::INT8, at::kChar},       {DataType::INT32, at::kInt},
      {DataType::UINT8, at::kByte},      {DataType::INT16, at::kShort},
      {DataType::UINT16, at::kUInt16},   {DataType::UINT32, at::kUInt32},
      {DataType::INT64, at::kLong},      {DataType::UINT64, at::kUInt64},
      {DataType::DOUBLE, at::kDouble},   {DataType::BOOL, at::kBool},
  };
  return table;
}

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

int64_t axis_of(int64_t axis, Tensor* x, const std::string& layer) {
  const int64_t rank = x->GetDimensions().Size();
  if (axis < -rank || axis >= rank)
    refuse(layer + ": axis " + std::to_string(axis) + " of a tensor with " +
           std::to_string(rank) + " dims");
  return axis < 0 ? axis + rank : axis;
}

// One number for each spatial dim: none means `value`, one means all of them.
std::vector<int64_t> spread(const Dims& given, size_t count, int64_t value, const char* what) {
  if (given.Size() == 0) return std::vector<int64_t>(count, value);
  if (given.Size() == 1) return std::vector<int64_t>(count, given[0]);
  if (given.Size() != static_cast<int64_t>(count))
    refuse(std::string(what) + " has " + std::to_string(given.Size()) + " numbers for " +
           std::to_string(count) + " spatial dims");
  return given.Vector();
}

size_t spatial(Tensor* x, const std::string& layer) {
  const int64_t rank = x->GetDimensions().Size();
  if (rank < 3 || rank > 5)
    refuse(layer + ": needs [batch, channels, 1 to 3 spatial dims], got a tensor with " +
           std::to_string(rank) + " dims");
  return static_cast<size_t>(rank - 2);
}

}  // namespace

at::ScalarType toScalarType(DataType type) {
  for (const auto& [ours, theirs] : types())
    if (ours == type) return theirs;
  refuse("this DataType is no type of a tensor");
}

DataType toDataType(at::ScalarType type) {
  for (const auto& [ours, theirs] : types())
    if (theirs == type) return ours;
  return DataType::UNKNOWN;
}

bool Dims::IsStatic() const {
  for (int64_t size : sizes_)
    if (size < 0) return false;
  return true;
}

WeightsBuf::WeightsBuf(const void* values, DataType type, int64_t count) {
  if (count < 0 || (count > 0 && values == nullptr)) refuse("weights without values");
  if (count > 0)
    values_ = at::from_blob(const_cast<void*>(values), {count}, toScalarType(type)).clone();
}

// --- Tensors and layers ---

Dims Tensor::GetDimensions() {
  if (producer_) producer_->Built();
  return Dims(shape_);
}

at::ScalarType Tensor::GetScalarType() {
  if (producer_) producer_->Built();
  return type_;
}

DataType Tensor::GetType() { return toDataType(GetScalarType()); }

void Layer::Open() const {
  if (built_)
    throw std::logic_error(
        kind_ + " layer " + name_ + " is built already. Set it up before its outputs are used.");
}

const std::vector<Tensor*>& Layer::Built() {
  if (built_) return made_;
  built_ = true;
  made_ = Lower(*net_);
  for (Tensor* tensor : made_) net_->Id(tensor);  // what it gives may be another layer's, not yet built
  for (auto& promised : promised_) {
    if (promised->index_ >= made_.size())
      throw std::out_of_range(
          kind_ + " layer " + name_ + " has " + std::to_string(made_.size()) +
          " outputs, not one at " + std::to_string(promised->index_));
    Tensor* real = made_[promised->index_];
    promised->id_ = real->id_;
    promised->shape_ = real->shape_;
    promised->type_ = real->type_;
  }
  return made_;
}

Tensor* Layer::GetOutput(int64_t index) {
  if (index < 0) throw std::out_of_range(kind_ + " layer: output " + std::to_string(index));
  for (auto& promised : promised_)
    if (promised->index_ == static_cast<size_t>(index)) return promised.get();
  if (built_ && static_cast<size_t>(index) >= made_.size())
    throw std::out_of_range(
        kind_ + " layer " + name_ + " has " + std::to_string(made_.size()) + " outputs, not one at " +
        std::to_string(index));
  auto promised = std::make_unique<Tensor>();
  promised->producer_ = this;
  promised->index_ = static_cast<size_t>(index);
  if (built_) {
    promised->id_ = made_[index]->id_;
    promised->shape_ = made_[index]->shape_;
    promised->type_ = made_[index]->type_;
  }
  promised_.push_back(std::move(promised));
  return promised_.back().get();
}

int64_t Layer::GetOutputNum() { return static_cast<int64_t>(Built().size()); }

// --- The network ---

Tensor* Network::Given(const Graph::Made& made, bool input) {
  auto tensor = std::make_unique<Tensor>();
  tensor->id_ = made.id;
  tensor->shape_ = made.shape;
  tensor->type_ = made.type;
  tensors_.push_back(std::move(tensor));
  if (input) inputs_.push_back(tensors_.back().get());
  return tensors_.back().get();
}

int64_t Network::Id(Tensor* tensor) {
  if (tensor == nullptr) refuse("a null tensor");
  if (tensor->producer_) tensor->producer_->Built();
  if (tensor->id_ < 0) refuse("a layer takes its own output");
  return tensor->id_;
}

std::vector<Tensor*> Network::Call(
    const std::string& op, std::vector<Argument> args, Attributes named) {
  for (auto& arg : args)  // build what it reads
    for (Tensor* tensor : arg.tensors) Id(tensor);
  for (auto& [name, arg] : named)
    for (Tensor* tensor : arg.tensors) Id(tensor);
  std::vector<Tensor*> made;
  for (const auto& one : graph_.Call(op, args, named)) made.push_back(Given(one, false));
  return made;
}

Tensor* Network::One(const std::string& op, std::vector<Argument> args, Attributes named) {
  return Call(op, std::move(args), std::move(named)).at(0);
}

Tensor* Network::AddInput(const char*, DataType, const Dims&) {
  throw std::logic_error("a converter adds no inputs: those of the call are its arguments");
}

template <typename L>
L* Network::Add(const char* kind, std::vector<Tensor*> inputs) {
  for (Tensor* tensor : inputs)
    if (tensor == nullptr) refuse(std::string(kind) + " layer: a null tensor");
  auto layer = std::make_unique<L>();
  L* made = layer.get();
  made->net_ = this;
  made->kind_ = kind;
  made->inputs_ = std::move(inputs);
  layers_.push_back(std::move(layer));
  return made;
}

// --- Layers, one by one ---

ActivationLayer* Network::AddActivation(Tensor* x, ActivationKind kind) {
  auto* layer = Add<ActivationLayer>("activation", {x});
  layer->Kind_ = kind;
  switch (kind) {  // what torch takes where nothing is said
    case ActivationKind::LEAKY_RELU: layer->Alpha_ = 0.01; break;
    case ActivationKind::ELU: layer->Alpha_ = 1.0; break;
    case ActivationKind::SOFTPLUS: layer->Alpha_ = 1.0; layer->Beta_ = 1.0; break;
    case ActivationKind::HARD_SIGMOID: layer->Alpha_ = 1.0 / 6; layer->Beta_ = 0.5; break;
    case ActivationKind::CLIP: layer->Alpha_ = 0.0; layer->Beta_ = 6.0; break;
    default: break;
  }
  return layer;
}

std::vector<Tensor*> ActivationLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  switch (Kind_) {
    case ActivationKind::RELU: return net.Call("aten::relu", {x});
    case ActivationKind::RELU6: return net.Call("aten::hardtanh", {x, 0.0, 6.0});
    case ActivationKind::SIGMOID: return net.Call("aten::sigmoid", {x});
    case ActivationKind::TANH: return net.Call("aten::tanh", {x});
    case ActivationKind::LEAKY_RELU: return net.Call("aten::leaky_relu", {x, Alpha_});
    case ActivationKind::ELU: return net.Call("aten::elu", {x, Alpha_});
    case ActivationKind::SELU: return net.Call("aten::selu", {x});
    case ActivationKind::SOFTPLUS: {  // alpha * log(1 + exp(beta * x)) / beta
      Tensor* made = net.One("aten::softplus", {x, Beta_});
      return Alpha_ == 1.0 ? std::vector<Tensor*>{made} : net.Call("aten::mul", {made, Alpha_});
    }
    case ActivationKind::SOFTSIGN: {
      Tensor* below = net.One("aten::add", {net.One("aten::abs", {x}), int64_t{1}});
      return net.Call("aten::div", {x, below});
    }
    case ActivationKind::GELU: return net.Call("aten::gelu", {x});
    case ActivationKind::SILU: return net.Call("aten::silu", {x});
    case ActivationKind::MISH: return net.Call("aten::mish", {x});
    case ActivationKind::HARD_SIGMOID: {
      Tensor* line = net.One("aten::add", {net.One("aten::mul", {x, Alpha_}), Beta_});
      return net.Call("aten::clamp", {line, 0.0, 1.0});
    }
    case ActivationKind::HARD_SWISH: return net.Call("aten::hardswish", {x});
    case ActivationKind::CLIP: return net.Call("aten::clamp", {x, Alpha_, Beta_});
  }
  refuse("no such activation");
}

ConstantLayer* Network::AddConstant(const at::Tensor& values) {
  if (!values.defined()) refuse("constant layer: there are no values");
  auto* layer = Add<ConstantLayer>("constant", {});
  layer->values_ = values;
  return layer;
}

ConstantLayer* Network::AddConstant(const Dims& dims, const WeightsBuf& values) {
  if (values.empty()) refuse("constant layer: there are no values");
  return AddConstant(values.values().reshape(dims.Vector()));
}

std::vector<Tensor*> ConstantLayer::Lower(Network& net) {
  return {net.Given(net.graph_.Constant(values_), false)};
}

ConvolutionLayer* Network::AddConvolution(Tensor* x, Tensor* weight, Tensor* bias) {
  std::vector<Tensor*> inputs{x, weight};
  if (bias) inputs.push_back(bias);
  auto* layer = Add<ConvolutionLayer>("convolution", inputs);
  layer->weight_ = weight;
  layer->bias_ = bias;
  return layer;
}

ConvolutionLayer* Network::AddConvolution(
    Tensor* x, int64_t outputs, const Dims& kernel, const WeightsBuf& weight,
    const WeightsBuf& bias) {
  if (weight.empty()) refuse("convolution layer: there are no weights");
  std::vector<int64_t> shape{outputs, -1};
  shape.insert(shape.end(), kernel.Vector().begin(), kernel.Vector().end());
  Tensor* held = AddConstant(weight.values().reshape(shape))->GetOutput(0);
  return AddConvolution(
      x, held, bias.empty() ? nullptr : AddConstant(bias.values())->GetOutput(0));
}

std::vector<Tensor*> ConvolutionLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  const size_t count = spatial(x, "convolution layer");
  Argument bias = bias_ ? Argument(bias_) : Argument(c10::IValue());
  return net.Call(
      "aten::convolution",
      {x, weight_, bias, spread(Strides_, count, 1, "Strides"),
       spread(Paddings_, count, 0, "Paddings"), spread(Dilations_, count, 1, "Dilations"),
       Transposed_, spread(OutputPaddings_, count, 0, "OutputPaddings"), GroupNum_});
}

ElementWiseLayer* Network::AddElementWise(Tensor* a, Tensor* b, ElementWiseOperation operation) {
  auto* layer = Add<ElementWiseLayer>("element-wise", {a, b});
  layer->Operation_ = operation;
  return layer;
}

std::vector<Tensor*> ElementWiseLayer::Lower(Network& net) {
  const auto call = [&](const char* op) { return net.Call(op, {inputs_[0], inputs_[1]}); };
  switch (Operation_) {
    case ElementWiseOperation::ADD: return call("aten::add");
    case ElementWiseOperation::SUB: return call("aten::sub");
    case ElementWiseOperation::MUL: return call("aten::mul");
    case ElementWiseOperation::DIV: return call("aten::div");
    case ElementWiseOperation::FLOOR_DIV:
      return net.Call("aten::div", {inputs_[0], inputs_[1]}, {{"rounding_mode", std::string("floor")}});
    case ElementWiseOperation::MAX: return call("aten::maximum");
    case ElementWiseOperation::MIN: return call("aten::minimum");
    case ElementWiseOperation::POW: return call("aten::pow");
    case ElementWiseOperation::MOD: return call("aten::remainder");
    case ElementWiseOperation::EQUAL: return call("aten::eq");
    case ElementWiseOperation::GREATER: return call("aten::gt");
    case ElementWiseOperation::LESS: return call("aten::lt");
    case ElementWiseOperation::AND: return call("aten::logical_and");
    case ElementWiseOperation::OR: return call("aten::logical_or");
    case ElementWiseOperation::XOR: return call("aten::logical_xor");
  }
  refuse("no such element-wise operation");
}

UnaryLayer* Network::AddUnary(Tensor* x, UnaryOperation operation) {
  auto* layer = Add<UnaryLayer>("unary", {x});
  layer->Operation_ = operation;
  return layer;
}

std::vector<Tensor*> UnaryLayer::Lower(Network& net) {
  const auto call = [&](const char* op) { return net.Call(op, {inputs_[0]}); };
  switch (Operation_) {
    case UnaryOperation::EXP: return call("aten::exp");
    case UnaryOperation::LOG: return call("aten::log");
    case UnaryOperation::SQRT: return call("aten::sqrt");
    case UnaryOperation::RECIPROCAL: return call("aten::reciprocal");
    case UnaryOperation::ABS: return call("aten::abs");
    case UnaryOperation::NEG: return call("aten::neg");
    case UnaryOperation::SIN: return call("aten::sin");
    case UnaryOperation::COS: return call("aten::cos");
    case UnaryOperation::TAN: return call("aten::tan");
    case UnaryOperation::CEIL: return call("aten::ceil");
    case UnaryOperation::FLOOR: return call("aten::floor");
    case UnaryOperation::ROUND: return call("aten::round");
    case UnaryOperation::ERF: return call("aten::erf");
    case UnaryOperation::NOT: return call("aten::logical_not");
    case UnaryOperation::SIGN: return call("aten::sign");
  }
  refuse("no such unary operation");
}

MatrixMultiplyLayer* Network::AddMatrixMultiply(
    Tensor* a, MatrixOperation first, Tensor* b, MatrixOperation second) {
  auto* layer = Add<MatrixMultiplyLayer>("matrix-multiply", {a, b});
  layer->First_ = first;
  layer->Second_ = second;
  return layer;
}

std::vector<Tensor*> MatrixMultiplyLayer::Lower(Network& net) {
  const auto side = [&](Tensor* x, MatrixOperation operation) {
    const int64_t rank = x->GetDimensions().Size();
    if (operation == MatrixOperation::TRANSPOSE) {
      if (rank < 2) refuse("matrix-multiply layer: a vector cannot be transposed");
      return net.One("aten::transpose", {x, int64_t{-2}, int64_t{-1}});
    }
    return x;
  };
  Tensor* a = side(inputs_[0], First_);
  Tensor* b = side(inputs_[1], Second_);
  const int64_t left = a->GetDimensions().Size(), right = b->GetDimensions().Size();
  // A batch of vectors is a batch of matrices with one row (or column), which goes again.
  const bool row = First_ == MatrixOperation::VECTOR && left > 1;
  const bool column = Second_ == MatrixOperation::VECTOR && right > 1;
  if (row) a = net.One("aten::unsqueeze", {a, int64_t{-2}});
  if (column) b = net.One("aten::unsqueeze", {b, int64_t{-1}});
  Tensor* made = net.One("aten::matmul", {a, b});
  if (row) made = net.One("aten::squeeze.dim", {made, int64_t{-2}});
  if (column) made = net.One("aten::squeeze.dim", {made, int64_t{-1}});
  return {made};
}

PoolingLayer* Network::AddPooling(Tensor* x, PoolingType type, const Dims& window) {
  auto* layer = Add<PoolingLayer>("pooling", {x});
  layer->Type_ = type;
  layer->WindowSize_ = window;
  return layer;
}

std::vector<Tensor*> PoolingLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  const size_t count = spatial(x, "pooling layer");
  if (WindowSize_.Size() == 0) refuse("pooling layer: there is no window");
  const auto window = spread(WindowSize_, count, 1, "WindowSize");
  const auto strides = Strides_.Size() ? spread(Strides_, count, 1, "Strides") : window;
  const auto paddings = spread(Paddings_, count, 0, "Paddings");
  const std::string dims = std::to_string(count) + "d";
  if (Type_ == PoolingType::MAX)
    return net.Call("aten::max_pool" + dims, {x, window, strides, paddings,
        std::vector<int64_t>(count, 1), CeilMode_});
  return net.Call("aten::avg_pool" + dims,
      {x, window, strides, paddings, CeilMode_, CountIncludePad_});
}

ReduceLayer* Network::AddReduce(
    Tensor* x, ReduceOperation operation, const std::vector<int64_t>& axes, bool keepDims) {
  auto* layer = Add<ReduceLayer>("reduce", {x});
  layer->Operation_ = operation;
  layer->Axes_ = axes;
  layer->KeepDims_ = keepDims;
  return layer;
}

std::vector<Tensor*> ReduceLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  std::vector<int64_t> axes;
  for (int64_t axis : Axes_) axes.push_back(axis_of(axis, x, "reduce layer"));
  if (axes.empty())
    for (int64_t i = 0; i < x->GetDimensions().Size(); ++i) axes.push_back(i);
  switch (Operation_) {
    case ReduceOperation::SUM: return net.Call("aten::sum", {x, axes, KeepDims_});
    case ReduceOperation::MEAN: return net.Call("aten::mean", {x, axes, KeepDims_});
    case ReduceOperation::MAX: return net.Call("aten::amax", {x, axes, KeepDims_});
    case ReduceOperation::MIN: return net.Call("aten::amin", {x, axes, KeepDims_});
    case ReduceOperation::PROD: {  // torch takes one axis at a time
      std::sort(axes.rbegin(), axes.rend());
      for (int64_t axis : axes) x = net.One("aten::prod.dim_int", {x, axis, KeepDims_});
      return {x};
    }
  }
  refuse("no such reduction");
}

ShuffleLayer* Network::AddShuffle(Tensor* x) { return Add<ShuffleLayer>("shuffle", {x}); }

std::vector<Tensor*> ShuffleLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  if (!FirstTranspose_.empty()) x = net.One("aten::permute", {x, FirstTranspose_});
  if (reshape_) {
    std::vector<int64_t> shape = shape_.Vector();
    const Dims old = x->GetDimensions();
    int64_t rest = 0;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] == 0) {
        if (static_cast<int64_t>(i) >= old.Size())
          refuse("shuffle layer: size 0 (as it was) in dim " + std::to_string(i) + " of a tensor with " +
                 std::to_string(old.Size()) + " dims");
        shape[i] = old[static_cast<int64_t>(i)];
      }
      rest += shape[i] < 0;
    }
    if (rest > 1) refuse("shuffle layer: more than one size is left open");
    x = net.One("aten::reshape", {x, shape});
  }
  if (!SecondTranspose_.empty()) x = net.One("aten::permute", {x, SecondTranspose_});
  if (x == inputs_[0]) x = net.One("aten::clone", {x});
  return {x};
}

ShapeLayer* Network::AddShape(Tensor* x) { return Add<ShapeLayer>("shape", {x}); }

std::vector<Tensor*> ShapeLayer::Lower(Network& net) {
  const Dims dims = inputs_[0]->GetDimensions();
  if (!dims.IsStatic()) refuse("shape layer: the shape is known at run time only");
  return {net.AddConstant(at::tensor(dims.Vector(), at::kLong))->GetOutput(0)};
}

ClipLayer* Network::AddClip(Tensor* x, double min, double max) {
  auto* layer = Add<ClipLayer>("clip", {x});
  layer->Min_ = min;
  layer->Max_ = max;
  return layer;
}

std::vector<Tensor*> ClipLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  if (c10::isIntegralType(x->GetScalarType(), true))  // whole bounds keep the type
    return net.Call("aten::clamp", {x, static_cast<int64_t>(std::ceil(Min_)),
        static_cast<int64_t>(std::floor(Max_))});
  return net.Call("aten::clamp", {x, Min_, Max_});
}

QuantizeLayer* Network::AddQuantize(Tensor* x, double scale) {
  auto* layer = Add<QuantizeLayer>("quantize", {x});
  layer->Scale_ = scale;
  return layer;
}

std::vector<Tensor*> QuantizeLayer::Lower(Network& net) {
  if (OutputType_ != DataType::INT8 && OutputType_ != DataType::UINT8)
    refuse("quantize layer: the output type is INT8 or UINT8");
  const bool sign = OutputType_ == DataType::INT8;
  Tensor* x = net.One("aten::mul", {inputs_[0], Scale_});
  if (Offset_ != 0.0) x = net.One("aten::add", {x, Offset_});
  x = net.One("aten::round", {x});
  x = net.One("aten::clamp", {x, sign ? -128.0 : 0.0, sign ? 127.0 : 255.0});
  return net.Call("aten::_to_copy", {x}, {{"dtype", toScalarType(OutputType_)}});
}

DequantizeLayer* Network::AddDequantize(Tensor* x, double scale) {
  auto* layer = Add<DequantizeLayer>("dequantize", {x});
  layer->Scale_ = scale;
  return layer;
}

std::vector<Tensor*> DequantizeLayer::Lower(Network& net) {
  if (Scale_ == 0.0) refuse("dequantize layer: the scale is 0");
  Tensor* x =
      net.One("aten::_to_copy", {inputs_[0]}, {{"dtype", toScalarType(OutputType_)}});
  if (Offset_ != 0.0) x = net.One("aten::sub", {x, Offset_});
  return net.Call("aten::div", {x, Scale_});
}

CumsumLayer* Network::AddCumsum(Tensor* x, int64_t axis) {
  auto* layer = Add<CumsumLayer>("cumsum", {x});
  layer->Axis_ = axis;
  return layer;
}

std::vector<Tensor*> CumsumLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  const int64_t axis = axis_of(Axis_, x, "cumsum layer");
  const std::vector<int64_t> axes{axis};
  if (Reverse_) x = net.One("aten::flip", {x, axes});
  Tensor* made = net.One("aten::cumsum", {x, axis});
  if (Exclusive_) made = net.One("aten::sub", {made, x});
  if (Reverse_) made = net.One("aten::flip", {made, axes});
  return {made};
}

SoftmaxLayer* Network::AddSoftmax(Tensor* x, int64_t axis) {
  auto* layer = Add<SoftmaxLayer>("softmax", {x});
  layer->Axis_ = axis;
  return layer;
}

std::vector<Tensor*> SoftmaxLayer::Lower(Network& net) {
  return net.Call("aten::_softmax", {inputs_[0], axis_of(Axis_, inputs_[0], "softmax layer"), false});
}

ConcatLayer* Network::AddConcat(const std::vector<Tensor*>& xs, int64_t axis) {
  if (xs.empty()) refuse("concat layer: there is nothing to join");
  auto* layer = Add<ConcatLayer>("concat", xs);
  layer->Axis_ = axis;
  return layer;
}

std::vector<Tensor*> ConcatLayer::Lower(Network& net) {
  return net.Call("aten::cat", {inputs_, axis_of(Axis_, inputs_[0], "concat layer")});
}

SliceLayer* Network::AddSlice(
    Tensor* x, const Dims& start, const Dims& lengths, const Dims& strides) {
  auto* layer = Add<SliceLayer>("slice", {x});
  layer->Start_ = start;
  layer->Lengths_ = lengths;
  layer->Strides_ = strides;
  return layer;
}

std::vector<Tensor*> SliceLayer::Lower(Network& net) {
  Tensor* x = inputs_[0];
  const Dims shape = x->GetDimensions();
  if (Start_.Size() != shape.Size() || Lengths_.Size() != shape.Size() ||
      (Strides_.Size() != 0 && Strides_.Size() != shape.Size()))
    refuse("slice layer: start, lengths and strides have one number for each of the " +
           std::to_string(shape.Size()) + " dims");
  for (int64_t dim = 0; dim < shape.Size(); ++dim) {
    const int64_t step = Strides_.Size() ? Strides_[dim] : 1;
    if (step < 1 || Start_[dim] < 0) refuse("slice layer: strides are 1 or more, starts 0 or more");
    if (Start_[dim] == 0 && step == 1 && (Lengths_[dim] == -1 || Lengths_[dim] == shape[dim])) continue;
    const int64_t end =
        Lengths_[dim] < 0 ? INT64_MAX : Start_[dim] + (Lengths_[dim] - 1) * step + 1;
    x = net.One("aten::slice.Tensor", {x, dim, Start_[dim], Lengths_[dim] == 0 ? Start_[dim] : end, step});
  }
  if (x == inputs_[0]) x = net.One("aten::clone", {x});
  return {x};
}

GatherLayer* Network::AddGather(Tensor* x, Tensor* indices, int64_t axis) {
  auto* layer = Add<GatherLayer>("gather", {x, indices});
  layer->Axis_ = axis;
  return layer;
}

std::vector<Tensor*> GatherLayer::Lower(Network& net) {
  Tensor *x = inputs_[0], *indices = inputs_[1];
  const int64_t axis = axis_of(Axis_, x, "gather layer");
  const Dims shape = x->GetDimensions(), taken = indices->GetDimensions();
  if (taken.Size() == 1) return net.Call("aten::index_select", {x, axis, indices});
  std::vector<int64_t> wanted(shape.Vector().begin(), shape.Vector().begin() + axis);
  wanted.insert(wanted.end(), taken.Vector().begin(), taken.Vector().end());
  wanted.insert(wanted.end(), shape.Vector().begin() + axis + 1, shape.Vector().end());
  if (std::count_if(wanted.begin(), wanted.end(), [](int64_t size) { return size < 0; }) > 1)
    refuse("gather layer: more than one size is known at run time only");
  Tensor* flat = net.One("aten::reshape", {indices, std::vector<int64_t>{-1}});
  return net.Call("aten::reshape", {net.One("aten::index_select", {x, axis, flat}), wanted});
}

CastLayer* Network::AddCast(Tensor* x, DataType type) {
  auto* layer = Add<CastLayer>("cast", {x});
  layer->ToType_ = type;
  return layer;
}

std::vector<Tensor*> CastLayer::Lower(Network& net) {
  return net.Call("aten::_to_copy", {inputs_[0]}, {{"dtype", toScalarType(ToType_)}});
}

OperatorLayer* Network::AddLayer(
    const std::string& op, std::vector<Argument> args, Attributes named) {
  std::vector<Tensor*> inputs;
  for (auto& arg : args) inputs.insert(inputs.end(), arg.tensors.begin(), arg.tensors.end());
  auto* layer = Add<OperatorLayer>("operator", std::move(inputs));
  layer->op_ = op;
  layer->args_ = std::move(args);
  layer->named_ = std::move(named);
  return layer;
}

std::vector<Tensor*> OperatorLayer::Lower(Network& net) { return net.Call(op_, args_, named_); }

}  // namespace AscendIE
