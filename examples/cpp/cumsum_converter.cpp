// A converter in C++: `torch.cumsum` becomes a layer of the network.
#include <stdexcept>

#include "core/conversion/converters/converters.h"
#include "core/util/jit_util.h"

namespace {

using torch_aie::core::conversion::ConversionCtx;
using torch_aie::core::conversion::Var;
using torch_aie::core::conversion::converters::args;
using torch_aie::core::conversion::converters::RegisterNodeConverters;

bool cumsum(ConversionCtx* ctx, const torch::jit::Node* n, args& args) {
  if (!args[2].isNone()) return false;  // another dtype: torch runs it
  AscendIE::Tensor* x = args[0].getFreezeAscendTensor(ctx);
  const int64_t rank = x->GetDimensions().Size();
  if (rank == 0) throw std::invalid_argument("cumsum of a tensor without dims");
  const int64_t dim = args[1].unwrapToInt();

  auto* layer = ctx->net->AddCumsum(x, dim < 0 ? dim + rank : dim);
  layer->SetName(torch_aie::core::util::nodeInfo(n).c_str());
  ctx->AssociateValueAndVar(n->outputs()[0], Var(layer->GetOutput(0)));
  return true;
}

// Registered when the library is loaded, taken back when it is closed.
auto registered = RegisterNodeConverters().pattern(
    "aten::cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor", cumsum);

}  // namespace
