// A converter for each layer: operators `layertest::*`, which the test defines by torch functions.
#include <stdexcept>

#include "core/conversion/converters/converters.h"

namespace {

using namespace AscendIE;
using torch_aie::core::conversion::ConversionCtx;
using torch_aie::core::conversion::Var;
using torch_aie::core::conversion::converters::addPadding;
using torch_aie::core::conversion::converters::addUnpadding;
using torch_aie::core::conversion::converters::args;
using torch_aie::core::conversion::converters::RegisterNodeConverters;
using torch_aie::core::conversion::converters::Weights;

#define CONVERTER(name, ...)                                                               \
  auto r_##name = RegisterNodeConverters().pattern(                                        \
      "layertest::" #name "(Tensor x, Tensor y) -> Tensor",                                \
      [](ConversionCtx* ctx, const torch::jit::Node* n, args& args) -> bool {              \
        Network* net = ctx->net;                                                           \
        Tensor *x = args[0].getAscendTensor(), *y = args[1].getFreezeAscendTensor(ctx);    \
        (void)y;                                                                           \
        auto* layer = [&] __VA_ARGS__();                                                   \
        ctx->AssociateValueAndVar(n->outputs()[0], Var(layer->GetOutput(0)));              \
        return true;                                                                       \
      });

#define ACTIVATION(name, kind) \
  CONVERTER(name, { return net->AddActivationLayer(x, ActivationKind::kind); })
ACTIVATION(relu, RELU)
ACTIVATION(relu6, RELU6)
ACTIVATION(sigmoid, SIGMOID)
ACTIVATION(tanh, TANH)
ACTIVATION(leaky_relu, LEAKY_RELU)
ACTIVATION(elu, ELU)
ACTIVATION(selu, SELU)
ACTIVATION(softplus, SOFTPLUS)
ACTIVATION(softsign, SOFTSIGN)
ACTIVATION(gelu, GELU)
ACTIVATION(silu, SILU)
ACTIVATION(mish, MISH)
ACTIVATION(hard_sigmoid, HARD_SIGMOID)
ACTIVATION(hard_swish, HARD_SWISH)
ACTIVATION(clip6, CLIP)
CONVERTER(leaky_set, {
  auto* layer = net->AddActivation(x, ActivationKind::LEAKY_RELU);
  layer->SetAlpha(0.3);
  return layer;
})

#define ELEMENTWISE(name, kind) \
  CONVERTER(name, { return net->AddElementWise(x, y, ElementWiseOperation::kind); })
ELEMENTWISE(add, ADD)
ELEMENTWISE(sub, SUB)
ELEMENTWISE(mul, MUL)
ELEMENTWISE(div, DIV)
ELEMENTWISE(floor_div, FLOOR_DIV)
ELEMENTWISE(maximum, MAX)
ELEMENTWISE(minimum, MIN)
ELEMENTWISE(pow, POW)
ELEMENTWISE(mod, MOD)
ELEMENTWISE(equal, EQUAL)
ELEMENTWISE(greater, GREATER)
ELEMENTWISE(less, LESS)
ELEMENTWISE(logical_and, AND)
ELEMENTWISE(logical_or, OR)
ELEMENTWISE(logical_xor, XOR)

#define UNARY(name, kind) CONVERTER(name, { return net->AddUnaryLayer(x, UnaryOperation::kind); })
UNARY(exp, EXP)
UNARY(log, LOG)
UNARY(sqrt, SQRT)
UNARY(reciprocal, RECIPROCAL)
UNARY(abs, ABS)
UNARY(neg, NEG)
UNARY(sin, SIN)
UNARY(cos, COS)
UNARY(tan, TAN)
UNARY(ceil, CEIL)
UNARY(floor, FLOOR)
UNARY(round, ROUND)
UNARY(erf, ERF)
UNARY(logical_not, NOT)
UNARY(sign, SIGN)

#define REDUCE(name, kind, axes, keep) \
  CONVERTER(name, { return net->AddReduceLayer(x, ReduceOperation::kind, axes, keep); })
REDUCE(sum_all, SUM, {}, false)
REDUCE(mean_keep, MEAN, (std::vector<int64_t>{-1}), true)
REDUCE(max_two, MAX, (std::vector<int64_t>{0, 1}), false)
REDUCE(min_last, MIN, (std::vector<int64_t>{-1}), false)
REDUCE(prod_two, PROD, (std::vector<int64_t>{0, -1}), false)

CONVERTER(matmul, {
  return net->AddMatrixMultiply(x, MatrixOperation::NONE, y, MatrixOperation::NONE);
})
CONVERTER(matmul_turned, {
  return net->AddMatrixMultiplyLayer(x, MatrixOperation::TRANSPOSE, y, MatrixOperation::TRANSPOSE);
})
CONVERTER(matmul_vectors, {
  return net->AddMatrixMultiply(x, MatrixOperation::VECTOR, y, MatrixOperation::VECTOR);
})
CONVERTER(convolution, {
  auto* layer = net->AddConvolutionLayer(x, y);
  layer->SetStrides(Dims{2, 2});
  layer->SetPaddings(Dims{1, 1});
  layer->SetDilations(Dims{1});
  layer->SetGroupNum(2);
  return layer;
})
CONVERTER(convolution_weights, {
  const Weights weight(ctx, args[1].unwrapToAtTensor());
  const at::Tensor bias = at::ones({weight.num_output_maps});
  return net->AddConvolution(x, weight.num_output_maps, weight.kernel_shape, weight.data, bias);
})
CONVERTER(deconvolution, {
  auto* layer = net->AddConvolution(x, y);
  layer->SetTransposed(true);
  layer->SetStrides(Dims{2});
  return layer;
})
CONVERTER(max_pool, {
  auto* layer = net->AddPooling(x, PoolingType::MAX, Dims{3, 3});
  layer->SetStrides(Dims{2, 2});
  layer->SetPaddings(Dims{1, 1});
  return layer;
})
CONVERTER(avg_pool, {
  auto* layer = net->AddPoolingLayer(x, PoolingType::AVERAGE, Dims{2});
  layer->SetCeilMode(true);
  return layer;
})
CONVERTER(shuffle, {
  auto* layer = net->AddShuffleLayer(x);
  layer->SetFirstTranspose({1, 0});
  layer->SetReshapeDimensions(Dims{0, 2, -1});
  layer->SetSecondTranspose({2, 0, 1});
  return layer;
})
CONVERTER(shape, { return net->AddShapeLayer(x); })
CONVERTER(clip, { return net->AddClipLayer(x, -0.5, 0.25); })
CONVERTER(quantize, {
  auto* layer = net->AddQuantizeLayer(x, 40.0);
  layer->SetOffset(3.0);
  return layer;
})
CONVERTER(quantize_unsigned, {
  auto* layer = net->AddQuantize(x, 40.0);
  layer->SetOutputType(DataType::UINT8);
  return layer;
})
CONVERTER(dequantize, {
  auto* whole = net->AddQuantize(x, 40.0);
  whole->SetOffset(3.0);
  auto* layer = net->AddDequantizeLayer(whole->GetOutput(0), 40.0);
  layer->SetOffset(3.0);
  return layer;
})
CONVERTER(cumsum, { return net->AddCumsumLayer(x, 1); })
CONVERTER(cumsum_back, {
  auto* layer = net->AddCumsum(x, -1);
  layer->SetExclusive(true);
  layer->SetReverse(true);
  return layer;
})
CONVERTER(softmax, { return net->AddSoftmaxLayer(x); })
CONVERTER(concat, { return net->AddConcatLayer({x, y, x}, -1); })
CONVERTER(slice, { return net->AddSliceLayer(x, {1, 0}, {2, 2}, {1, 2}); })
CONVERTER(gather, {
  return net->AddGatherLayer(x, net->AddConstant(Dims{2, 2}, WeightsBuf(at::tensor({0, 2, 1, 0}, at::kLong)))->GetOutput(0), 1);
})
CONVERTER(cast, { return net->AddCastLayer(x, DataType::FLOAT16); })
CONVERTER(constant, {
  const float values[] = {1.5f, -2.5f, 3.5f};
  auto* held = net->AddConstantLayer(Dims{3}, WeightsBuf(values, DataType::FLOAT, 3));
  return net->AddElementWiseLayer(x, held->GetOutput(0), ElementWiseOperation::MUL);
})
CONVERTER(any_operator, {
  return net->AddLayer("aten::addcmul", {x, y, y}, {{"value", 0.5}});
})
CONVERTER(any_arguments, {
  return net->AddLayer("aten::clamp", {x, -1e30, 0.5});
})
CONVERTER(padded, {
  Tensor* wide = addPadding(ctx, n, x, 4, false);
  if (wide->GetDimensions() != Dims{1, 1, 4, 3}) throw std::logic_error("padding");
  return net->AddActivation(addUnpadding(ctx, n, wide, 2, false), ActivationKind::RELU);
})
CONVERTER(inputs_of_the_network, {
  if (net->GetInputNum() != 2 || net->GetInput(0) != x) throw std::logic_error("inputs");
  return net->AddUnary(net->GetInput(0), UnaryOperation::ABS);
})

// --- Refusals, each with a reason ---
CONVERTER(refuses_late_setter, {
  auto* layer = net->AddCumsum(x, 0);
  layer->GetOutput(0)->GetDimensions();
  layer->SetAxis(1);
  return layer;
})
CONVERTER(refuses_axis, { return net->AddCumsum(x, 9); })
CONVERTER(refuses_operator, { return net->AddLayer("aten::no_such_operator", {x}); })
CONVERTER(refuses_output, {
  net->AddUnary(x, UnaryOperation::ABS)->GetOutput(3)->GetDimensions();
  return net->AddUnary(x, UnaryOperation::ABS);
})
CONVERTER(refuses_input, {
  net->AddInput("z", DataType::FLOAT, Dims{1});
  return net->AddUnary(x, UnaryOperation::ABS);
})
CONVERTER(refuses_unknown, {
  args[0].unwrapToAtTensor();
  return net->AddUnary(x, UnaryOperation::ABS);
})
auto r_false = RegisterNodeConverters().pattern(
    "layertest::refuses_false(Tensor x, Tensor y) -> Tensor",
    [](ConversionCtx*, const torch::jit::Node*, args&) -> bool { return false; });
auto r_nothing = RegisterNodeConverters().pattern(
    "layertest::refuses_nothing(Tensor x, Tensor y) -> Tensor",
    [](ConversionCtx*, const torch::jit::Node*, args&) -> bool { return true; });
auto r_odd = RegisterNodeConverters().pattern(
    "layertest::refuses_odd(Tensor x, Tensor y) -> Tensor",
    [](ConversionCtx*, const torch::jit::Node*, args&) -> bool { throw 3; });

}  // namespace
