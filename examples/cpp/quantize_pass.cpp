// A pass in C++: four operators become one quantize layer, which gives int8.
#include "core/custom_pass/custom_pass.h"
#include "core/util/jit_util.h"

namespace {

using torch_aie::core::conversion::ConversionCtx;
using torch_aie::core::conversion::Var;
using torch_aie::core::conversion::converters::args;
using torch_aie::core::custom_pass::RegisterSubgraphConverters;

enum { kInput, kScale, kOffset, kAlpha, kLow, kHigh };

const char* kPattern = R"IR(
    graph(%x : Tensor, %scale : Tensor, %offset : Tensor, %alpha : int, %low : int, %high : int):
        %scaled : Tensor = aten::mul(%x, %scale)
        %moved : Tensor = aten::add(%scaled, %offset, %alpha)
        %whole : Tensor = aten::round(%moved)
        %result : Tensor = aten::clamp(%whole, %low, %high)
        return (%result))IR";

auto registered = RegisterSubgraphConverters().pattern(
    kPattern, [](ConversionCtx* ctx, const torch::jit::Node* n, args& args) -> bool {
      const bool is_int8 = args[kLow].unwrapToInt() == -128 && args[kHigh].unwrapToInt() == 127;
      if (!is_int8 || args[kAlpha].unwrapToInt() != 1) return false;  // this match stays as it is
      auto* layer = ctx->net->AddQuantize(
          args[kInput].getFreezeAscendTensor(ctx), args[kScale].unwrapToDouble());
      layer->SetOffset(args[kOffset].unwrapToDouble());
      layer->SetName(torch_aie::core::util::nodeInfo(n).c_str());
      ctx->AssociateValueAndVar(n->outputs()[0], Var(layer->GetOutput(0)));
      return true;
    });

}  // namespace
