"""Attention as code of Inductor's: scores, softmax and sums of a few rows at a time, which stay in
the first cache. torch 2.11 to 2.13."""

from __future__ import annotations

import functools
from typing import Any

ROWS = 8
"""Queries at a time: with two vectors of keys, 16 sums in registers."""

_PARTS = """
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();

// out[ROWS][COLS vectors] = a[ROWS][depth] * b[depth][COLS vectors] * scale[ROWS]
template <int ROWS, int COLS>
inline void product(const float* __restrict__ a, int64_t lda, const float* __restrict__ b,
                    int64_t ldb, int64_t depth, const float* scale, float* __restrict__ out,
                    int64_t ldo) {
    Vec sums[ROWS * COLS], row[COLS], one;
    c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) { sums[i] = Vec(0.0f); });
    for (int64_t k = 0; k < depth; ++k) {
        c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) {
            constexpr int r = i / COLS, c = i % COLS;
            if constexpr (r == 0) row[c] = Vec::loadu(b + k * ldb + c * LANES);
            if constexpr (c == 0) one = Vec(a[r * lda + k]);
            sums[i] = at::vec::fmadd(one, row[c], sums[i]);
        });
    }
    c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) {
        constexpr int r = i / COLS, c = i % COLS;
        (sums[i] * Vec(scale[r])).store(out + r * ldo + c * LANES);
    });
}

// Scores become their exponentials, less the largest; beyond `seen` they are none. Gives 1 / sum.
inline float soften(float* row, int64_t seen, int64_t padded) {
    for (int64_t c = seen; c < padded; ++c) row[c] = -std::numeric_limits<float>::infinity();
    Vec high = Vec::loadu(row), sum(0.0f);
    for (int64_t c = LANES; c < padded; c += LANES)
        high = at::vec::maximum(high, Vec::loadu(row + c));
    const Vec top(at::vec::vec_reduce_all<float>(
        [](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, high));
    for (int64_t c = 0; c < padded; c += LANES) {
        const Vec e = (Vec::loadu(row + c) - top).exp_u20();
        e.store(row + c);
        sum = sum + e;
    }
    return 1 / at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum);
}

// The answers to ROWS queries, of which the first is number `first`.
template <int ROWS, int DEPTH, int WIDTH, bool CAUSAL>
inline void answer(const float* q, int64_t q_step, const float* keys, const float* v,
                   int64_t v_step, float* out, int64_t out_step, float* scores, int64_t first,
                   int64_t count, float scale) {
    const int64_t seen = CAUSAL ? std::min(count, first + ROWS) : count;
    const int64_t vectors = (seen + LANES - 1) / LANES, all = (count + LANES - 1) / LANES;
    const int64_t padded = vectors * LANES;
    float factors[ROWS];
    std::fill_n(factors, ROWS, scale);
    for (int64_t t = 0; t < vectors; t += 2) {
        const float* panel = keys + t * LANES * DEPTH;
        if (t + 1 < vectors)
            product<ROWS, 2>(q, q_step, panel, 2 * LANES, DEPTH, factors, scores + t * LANES,
                             padded);
        else  // of a pair, or alone
            product<ROWS, 1>(q, q_step, panel, t + 1 < all ? 2 * LANES : LANES, DEPTH, factors,
                             scores + t * LANES, padded);
    }
    for (int64_t r = 0; r < ROWS; ++r) {
        const int64_t own = CAUSAL ? std::min(count, first + r + 1) : count;
        factors[r] = soften(scores + r * padded, own, padded);
    }
    int64_t c = 0;
    for (; c + 2 * LANES <= WIDTH; c += 2 * LANES)
        product<ROWS, 2>(scores, padded, v + c, v_step, seen, factors, out + c, out_step);
    if (c < WIDTH)
        product<ROWS, 1>(scores, padded, v + c, v_step, seen, factors, out + c, out_step);
}

// Keys as panels [pair of vectors][DEPTH][keys of the pair]; what is missing in the last are zeros.
template <int DEPTH>
inline void pack(const float* k, int64_t k_step, int64_t count, float* keys) {
    const int64_t vectors = (count + LANES - 1) / LANES;
    for (int64_t t = 0; t < vectors; ++t) {
        const int64_t wide = t / 2 * 2 + 1 < vectors ? 2 * LANES : LANES;
        float* to = keys + t / 2 * 2 * LANES * DEPTH + t % 2 * LANES;
        const float* from = k + t * LANES * k_step;
        const int64_t held = std::min(LANES, count - t * LANES);
        for (int64_t d = 0; d < DEPTH; d += LANES) {
            if (held == LANES) {
                at::vec::transpose_mxn<float, LANES, LANES>(from + d, k_step, to + d * wide, wide);
                continue;
            }
            for (int64_t i = 0; i < LANES; ++i)
                for (int64_t j = 0; j < LANES; ++j)
                    to[(d + i) * wide + j] = j < held ? from[j * k_step + d + i] : 0.0f;
        }
    }
}

inline float* aligned(const std::unique_ptr<float[]>& memory) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}
"""

_BODY = """
{{
    using namespace {name}_parts;
    constexpr int64_t padded = ({keys} + LANES - 1) / LANES * LANES;
    {parallel}
    {{
        const std::unique_ptr<float[]> memory(new float[padded * ({depth} + {rows}) + 16]);
        float* packed = aligned(memory);
        float* scores = packed + padded * {depth};
        {shared}
        for (int64_t i = 0; i < {batch} * {heads}; ++i) {{
            const int64_t b = i / {heads}, h = i % {heads};
            const float* q = &{q} + b * {qb} + h * {qh};
            const float* v = &{v} + b * {vb} + h * {vh};
            float* out = &{out} + b * {ob} + h * {oh};
            pack<{depth}>(&{k} + b * {kb} + h * {kh}, {kn}, {keys}, packed);
            int64_t n = 0;
            for (; n + {rows} <= {queries}; n += {rows})
                answer<{rows}, {depth}, {width}, {causal}>(
                    q + n * {qn}, {qn}, packed, v, {vn}, out + n * {on}, {on}, scores, n, {keys},
                    {scale}f);
            {rest}
        }}
    }}
}}
"""

_REST = """answer<{left}, {depth}, {width}, {causal}>(
                q + n * {qn}, {qn}, packed, v, {vn}, out + n * {on}, {on}, scores, n, {keys},
                {scale}f);"""


def generate_for(op: Any) -> None:
    """Code is generated for calls op(q, k, v, causal, scale) of [batch, head, position, channel]:
    32-bit floats on CPU whose sizes are known, channels a multiple of 16."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    def lower(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        nodes = [
            ir.ExternKernel.require_stride1(ir.ExternKernel.realize_input(x)) for x in (q, k, v)
        ]
        batch, heads, queries, _ = map(int, q.get_size())
        width = int(v.get_size()[-1])
        strides = [queries * heads * width, width, heads * width, 1]
        layout = ir.FixedLayout(
            q.get_device(), q.get_dtype(), [batch, heads, queries, width], strides
        )
        made = _template()(nodes, layout, causal, scale).generate().output_node()
        V.graph.no_fuse_buffer_names.add(made.get_name())
        return made

    register_lowering(op, type_promotion_kind=None)(lower)


@functools.cache
def _template() -> Any:
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.utils import parallel_num_threads

    class Attention(CppTemplate):
        """One call of attention."""

        def __init__(self, nodes: Any, layout: Any, causal: bool, scale: float) -> None:
            super().__init__("attention", nodes, layout, parallel_num_threads())
            self.causal, self.scale = causal, scale

        def render(self, kernel: Any, template_buffer_node: Any = None, **_: Any) -> str:  # type: ignore[override]
            q, k, v = self.input_nodes
            out: Any = template_buffer_node or self.output_node
            head = kernel.def_kernel(inputs={"Q": q, "K": k, "V": v}, outputs={"Y": out})
            batch, heads, queries, depth = map(int, q.get_size())
            rows = min(ROWS, queries)
            values: dict[str, Any] = {
                "name": kernel.kernel_name, "batch": batch, "heads": heads, "queries": queries,
                "depth": depth, "rows": rows, "left": queries % rows, "keys": int(k.get_size()[2]),
                "width": int(v.get_size()[3]), "causal": str(self.causal).lower(),
                "scale": repr(float(self.scale)), "parallel": "", "shared": "",
            }  # fmt: skip
            for key, node in (("q", q), ("k", k), ("v", v), ("o", out)):
                steps = map(int, node.get_stride()[:3])
                values |= dict(zip((f"{key}b", f"{key}h", f"{key}n"), steps, strict=True))
            for key, node in (("q", q), ("k", k), ("v", v), ("out", out)):
                values[key] = kernel.index(node, [0, 0, 0, 0])
            if self.num_threads > 1:
                values["parallel"] = f"#pragma omp parallel num_threads({self.num_threads})"
                values["shared"] = "#pragma omp for"
            values["rest"] = _REST.format(**values) if values["left"] else ""
            includes = "#include <limits>\n#include <memory>"
            parts = f"namespace {kernel.kernel_name}_parts {{{_PARTS}}}"
            return (
                f"{self.header().getvalue()}\n{includes}\n{parts}\n"
                f'extern "C"\n{head}{_BODY.format(**values)}'
            )

    return Attention
