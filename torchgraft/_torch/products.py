"""Large products with packed weights as code of Inductor's: 16 sums in registers, over as much of
a row as the second cache can hold of many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchgraft._torch.written import Source, Tensor, buffer, lower, realized

ROWS, PANEL = 8, 32
"""Rows and columns at a time: 16 sums in registers. With 48 columns gcc 12 keeps them in memory."""
DEPTH, BLOCK = 768, 128
"""How much of a row, and how many rows, are used while a cache holds them: less deep, and sums are
loaded and stored more often."""

PRODUCT = """
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();

// out[ROWS][WIDTH] = a[ROWS][depth] * b[depth][WIDTH] + base, which is out itself or one row
template <int ROWS, int WIDTH>
inline void product(const float* __restrict__ a, int64_t lda, const float* __restrict__ b,
                    int64_t depth, const float* base, int64_t ld_base, float* out, int64_t ldo) {
    constexpr int COLS = WIDTH / LANES;
    Vec sums[ROWS * COLS], row[COLS], one;
    c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) { sums[i] = Vec(0.0f); });
    for (int64_t k = 0; k < depth; ++k) {
        c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) {
            constexpr int r = i / COLS, c = i % COLS;
            if constexpr (r == 0) row[c] = Vec::loadu(b + (k * COLS + c) * LANES);
            if constexpr (c == 0) one = Vec(a[r * lda + k]);
            sums[i] = at::vec::fmadd(one, row[c], sums[i]);
        });
    }
    c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) {
        constexpr int r = i / COLS, c = i % COLS;
        if (base) sums[i] = sums[i] + Vec::loadu(base + r * ld_base + c * LANES);
        sums[i].store(out + r * ldo + c * LANES);
    });
}
"""

_BODY = """
    {parallel}
    for (int64_t k = 0; k < {inner}; k += {depth})
        for (int64_t first = 0; first < {rows}; first += {block}) {{
            const int64_t deep = std::min<int64_t>({depth}, {inner} - k);
            const int64_t end = std::min<int64_t>({rows}, first + {block});
            {shared}
            for (int64_t n = 0; n < {columns}; n += {panel}) {{
                const float* w = {weight.start} + n * {inner} + k * {panel};
                const float* x = {x.start} + k;
                float* out = {out.start} + n;
                const float* base = k ? out : {bias};
                const int64_t step = k ? {columns} : 0;
                int64_t m = first;
                for (; m + {some} <= end; m += {some})
                    product<{some}, {panel}>(x + m * {lda}, {lda}, w, deep,
                                             base ? base + m * step : nullptr, step,
                                             out + m * {columns}, {columns});
                {rest}
            }}
        }}
"""

_REST = """if (m < end)
                    product<{left}, {panel}>(x + m * {lda}, {lda}, w, deep,
                                             base ? base + m * step : nullptr, step,
                                             out + m * {columns}, {columns});"""


def generate_for(op: Any) -> None:
    """Code is generated for calls op(x, weight, bias) of matrices [row, inner], 32-bit floats on
    CPU whose sizes are known. Weights are panels [column / PANEL][inner][column of the panel]."""

    def call(x: Any, weight: Any, bias: Any) -> Any:
        from torch._inductor import ir

        rows, columns = int(x.get_size()[0]), int(weight.get_size()[0]) * PANEL
        data = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
        inputs = [data, *(realized(v) for v in (weight, bias) if v is not None)]
        return buffer("product", inputs, [rows, columns], [columns, 1], _write)

    lower(op, call)


def _write(inputs: Sequence[Tensor], out: Tensor, threads: int) -> Source:
    x, weight, *bias = inputs
    rows, inner = x.size
    values: dict[str, Any] = {
        "x": x, "weight": weight, "bias": f"{bias[0].start} + n" if bias else "nullptr", "out": out,
        "rows": rows, "inner": inner, "columns": out.size[1], "lda": x.stride[0], "some": ROWS,
        "left": rows % ROWS, "panel": PANEL, "depth": DEPTH, "block": BLOCK, "rest": "",
        "parallel": f"#pragma omp parallel num_threads({threads})" if threads > 1 else "",
        "shared": "#pragma omp for" if threads > 1 else "",
    }  # fmt: skip
    if rows % ROWS:
        values["rest"] = _REST.format(**values)
    return Source(PRODUCT, _BODY.format(**values))
