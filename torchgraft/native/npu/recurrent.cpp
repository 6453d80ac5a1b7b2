// The cells that torch calls for recurrent layers on accelerators. The CPU has no such kernels, so
// they are written in operators here. The workspaces are what the backward functions read.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace graft::npu {
namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

Tensor biased(const Tensor& gates, const Bias& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

Tensor sigmoid_slope(const Tensor& y) { return y * (1 - y); }
Tensor tanh_slope(const Tensor& y) { return 1 - y * y; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& cx, const Bias& input_bias,
                                             const Bias& hidden_bias) {
  auto gates = (biased(input, input_bias) + biased(hidden, hidden_bias)).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  Tensor cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Bias& grad_hy, const Bias& grad_cy,
                                                      const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  Tensor tanh_cy = cy.tanh(), grad_cell = at::zeros_like(cy), grad_out = at::zeros_like(cy);
  if (grad_hy && grad_hy->defined()) {
    grad_cell = *grad_hy * out * tanh_slope(tanh_cy);
    grad_out = *grad_hy * tanh_cy * sigmoid_slope(out);
  }
  if (grad_cy && grad_cy->defined()) grad_cell = grad_cell + *grad_cy;
  Tensor grad_gates = at::cat({grad_cell * cell * sigmoid_slope(in),
                               grad_cell * cx * sigmoid_slope(forget),
                               grad_cell * in * tanh_slope(cell), grad_out}, 1);
  return {grad_gates, grad_cell * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const Bias& input_bias, const Bias& hidden_bias) {
  auto from_input = biased(input, input_bias).chunk(3, 1);
  auto from_hidden = biased(hidden, hidden_bias).chunk(3, 1);
  Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  Tensor hy = fresh + update * (hx - fresh);
  return {hy, at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3];
  Tensor grad_update = grad * (hx - fresh) * sigmoid_slope(update);
  Tensor grad_fresh = grad * (1 - update) * tanh_slope(fresh);
  Tensor grad_reset = grad_fresh * kept[4] * sigmoid_slope(reset);
  Tensor grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad * update, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace graft::npu
