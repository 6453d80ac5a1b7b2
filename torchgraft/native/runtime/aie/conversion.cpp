// Vars, the context, and the helpers of converters.
#include <sstream>
#include <stdexcept>

#include "core/conversion/converters/converters.h"
#include "core/util/jit_util.h"

namespace torch_aie::core::conversion {

Var Var::unknown(std::string why) {
  Var made;
  made.why_ = std::move(why);
  return made;
}

std::string Var::type_name() const {
  if (known_) return value_.tagKind();
  return tensor_ ? "a tensor that is computed while the program runs" : why_;
}

void Var::mismatch(const char* wanted) const {
  throw std::invalid_argument("an argument is not " + std::string(wanted) + ": it is " + type_name());
}

AscendIE::Tensor* Var::getAscendTensor() const {
  if (!tensor_) mismatch("a tensor of the graph");
  return tensor_;
}

AscendIE::Tensor* Var::getFreezeAscendTensor(ConversionCtx* ctx) {
  if (!tensor_) tensor_ = ctx->net->AddConstant(unwrapToAtTensor())->GetOutput(0);
  return tensor_;
}

std::vector<AscendIE::Tensor*> Var::getAscendTensors(ConversionCtx* ctx) {
  std::vector<AscendIE::Tensor*> made;
  if (known_ && value_.isTensorList()) {
    for (const at::Tensor& tensor : value_.toTensorVector())
      made.push_back(ctx->net->AddConstant(tensor)->GetOutput(0));
    return made;
  }
  if (items_.empty()) mismatch("a list of tensors");
  for (Var& item : items_) made.push_back(item.getFreezeAscendTensor(ctx));
  return made;
}

const c10::IValue& Var::getIValue() const {
  if (!known_) mismatch("known at compile time");
  return value_;
}

at::Tensor Var::unwrapToAtTensor() const {
  const c10::IValue& value = getIValue();
  if (value.isTensor()) return value.toTensor();
  if (value.isDouble()) return at::scalar_tensor(value.toDouble(), at::kDouble);
  if (value.isInt()) return at::scalar_tensor(value.toInt(), at::kLong);
  if (value.isBool()) return at::scalar_tensor(value.toBool(), at::kBool);
  mismatch("a tensor or a number");
}

int64_t Var::unwrapToInt() const {
  const c10::IValue& value = getIValue();
  if (value.isInt()) return value.toInt();
  if (value.isBool()) return value.toBool();
  if (value.isTensor() && value.toTensor().numel() == 1 &&
      c10::isIntegralType(value.toTensor().scalar_type(), true))
    return value.toTensor().item<int64_t>();
  mismatch("an integer");
}

double Var::unwrapToDouble() const {
  const c10::IValue& value = getIValue();
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor() && value.toTensor().numel() == 1) return value.toTensor().item<double>();
  mismatch("a number");
}

bool Var::unwrapToBool() const {
  const c10::IValue& value = getIValue();
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt() != 0;
  mismatch("a bool");
}

at::Scalar Var::unwrapToScalar() const {
  const c10::IValue& value = getIValue();
  if (value.isScalar()) return value.toScalar();
  if (value.isTensor() && value.toTensor().numel() == 1) return value.toTensor().item();
  mismatch("a number");
}

std::string Var::unwrapToString() const {
  if (!getIValue().isString()) mismatch("a string");
  return value_.toStringRef();
}

at::ScalarType Var::unwrapToScalarType() const {
  return static_cast<at::ScalarType>(unwrapToInt());
}

std::vector<int64_t> Var::unwrapToIntVector() const {
  const c10::IValue& value = getIValue();
  if (value.isIntList()) return value.toIntVector();
  if (value.isInt()) return {value.toInt()};
  if (value.isList() && value.toListRef().empty()) return {};
  mismatch("a list of integers");
}

std::vector<double> Var::unwrapToDoubleVector() const {
  const c10::IValue& value = getIValue();
  if (value.isDoubleList()) return value.toDoubleVector();
  if (value.isIntList()) {
    const auto whole = value.toIntVector();
    return {whole.begin(), whole.end()};
  }
  if (value.isList() && value.toListRef().empty()) return {};
  mismatch("a list of numbers");
}

std::vector<bool> Var::unwrapToBoolVector() const {
  const c10::IValue& value = getIValue();
  if (!value.isBoolList()) mismatch("a list of bools");
  const auto list = value.toBoolList();
  return {list.begin(), list.end()};
}

#define TORCHGRAFT_OTHERWISE(Type, Name) \
  Type Var::Name(Type otherwise) const { return isNone() ? otherwise : Name(); }
TORCHGRAFT_OTHERWISE(at::Tensor, unwrapToAtTensor)
TORCHGRAFT_OTHERWISE(int64_t, unwrapToInt)
TORCHGRAFT_OTHERWISE(double, unwrapToDouble)
TORCHGRAFT_OTHERWISE(bool, unwrapToBool)
TORCHGRAFT_OTHERWISE(at::Scalar, unwrapToScalar)
TORCHGRAFT_OTHERWISE(std::string, unwrapToString)
TORCHGRAFT_OTHERWISE(at::ScalarType, unwrapToScalarType)
TORCHGRAFT_OTHERWISE(std::vector<int64_t>, unwrapToIntVector)
#undef TORCHGRAFT_OTHERWISE

AscendIE::Tensor* ConversionCtx::AssociateValueAndVar(const torch::jit::Value* value, Var var) {
  return AssociateValueAndTensor(value, var.getFreezeAscendTensor(this));
}

AscendIE::Tensor* ConversionCtx::AssociateValueAndTensor(
    const torch::jit::Value* value, AscendIE::Tensor* tensor) {
  if (value == nullptr || tensor == nullptr)
    throw std::invalid_argument("AssociateValueAndTensor: a null value or tensor");
  results[value] = tensor;
  return tensor;
}

namespace converters {

Weights::Weights(ConversionCtx*, at::Tensor tensor)
    : data(tensor.contiguous()), shape(tensor.sizes().vec()) {
  if (tensor.dim() > 0) num_output_maps = tensor.size(0);
  if (tensor.dim() > 1) num_input_maps = tensor.size(1);
  if (tensor.dim() > 2) kernel_shape = AscendIE::Dims(tensor.sizes().slice(2).vec());
}

namespace {
AscendIE::Tensor* reshaped(
    ConversionCtx* ctx, const torch::jit::Node* n, AscendIE::Tensor* tensor,
    std::vector<int64_t> shape) {
  if (std::count(shape.begin(), shape.end(), -1) > 1)
    throw std::invalid_argument("a shape of which more than one size is known at run time only");
  auto* layer = ctx->net->AddShuffle(tensor);
  layer->SetReshapeDimensions(AscendIE::Dims(std::move(shape)));
  layer->SetName(util::nodeInfo(n).c_str());
  return layer->GetOutput(0);
}
}  // namespace

AscendIE::Tensor* addPadding(
    ConversionCtx* ctx, const torch::jit::Node* n, AscendIE::Tensor* tensor, int64_t dims,
    bool trailing) {
  std::vector<int64_t> shape = tensor->GetDimensions().Vector();
  if (static_cast<int64_t>(shape.size()) >= dims) return tensor;
  const size_t more = static_cast<size_t>(dims) - shape.size();
  shape.insert(trailing ? shape.end() : shape.begin(), more, 1);
  return reshaped(ctx, n, tensor, std::move(shape));
}

AscendIE::Tensor* addUnpadding(
    ConversionCtx* ctx, const torch::jit::Node* n, AscendIE::Tensor* tensor, int64_t dims,
    bool trailing) {
  std::vector<int64_t> shape = tensor->GetDimensions().Vector();
  if (static_cast<int64_t>(shape.size()) <= dims) return tensor;
  while (static_cast<int64_t>(shape.size()) > dims) {
    const auto last = trailing ? shape.end() - 1 : shape.begin();
    if (*last != 1) throw std::invalid_argument("addUnpadding: a size of " + std::to_string(*last));
    shape.erase(last);
  }
  return reshaped(ctx, n, tensor, std::move(shape));
}

}  // namespace converters
}  // namespace torch_aie::core::conversion

namespace torch_aie::core::util {

std::string nodeInfo(const torch::jit::Node* n) {
  if (n == nullptr) return "";
  std::ostringstream text;
  n->print(text, 0, nullptr, false);
  std::string line = text.str();
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.pop_back();
  return line;
}

AscendIE::Dims toDims(c10::IntArrayRef sizes) { return AscendIE::Dims(sizes.vec()); }

std::vector<int64_t> toVec(const AscendIE::Dims& dims) { return dims.Vector(); }

AscendIE::Dims unsqueezeDims(const AscendIE::Dims& dims, int64_t position, int64_t value) {
  if (position < 0) position += dims.Size() + 1;
  if (position < 0 || position > dims.Size())
    throw std::out_of_range("unsqueezeDims: position " + std::to_string(position));
  std::vector<int64_t> sizes = dims.Vector();
  sizes.insert(sizes.begin() + position, value);
  return AscendIE::Dims(std::move(sizes));
}

AscendIE::Dims squeezeDims(const AscendIE::Dims& dims, int64_t position) {
  if (position < 0) position += dims.Size();
  if (position < 0 || position >= dims.Size())
    throw std::out_of_range("squeezeDims: position " + std::to_string(position));
  std::vector<int64_t> sizes = dims.Vector();
  sizes.erase(sizes.begin() + position);
  return AscendIE::Dims(std::move(sizes));
}

}  // namespace torch_aie::core::util
