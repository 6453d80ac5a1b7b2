"""Attention as code of Inductor's: scores, softmax and sums of a few rows at a time, which stay in
the first cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torchgraft._torch.written import Source, Tensor, buffer, lower, realized

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

// Scores, and what a mask adds, become their exponentials, less the largest; beyond `seen` they are
// none. Gives 1 / sum; a query that sees nothing has no answer but 0.
inline float soften(float* row, const float* mask, int64_t seen, int64_t padded) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    for (int64_t c = 0; mask && c < seen; c += LANES)
        (Vec::loadu(row + c) + Vec::loadu(mask + c, std::min(LANES, seen - c))).store(row + c);
    for (int64_t c = seen; c < padded; ++c) row[c] = none;
    Vec high = Vec::loadu(row), sum(0.0f);
    for (int64_t c = LANES; c < padded; c += LANES)
        high = at::vec::maximum(high, Vec::loadu(row + c));
    const float highest = at::vec::vec_reduce_all<float>(
        [](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, high);
    if (mask && highest == none) return std::fill_n(row, padded, 0.0f), 0.0f;
    const Vec top(highest);
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
                   int64_t v_step, const float* mask, int64_t mask_step, float* out,
                   int64_t out_step, float* scores, int64_t first, int64_t count, float scale) {
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
        const float* more = mask ? mask + r * mask_step : nullptr;
        factors[r] = soften(scores + r * padded, more, own, padded);
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
    constexpr int64_t padded = ({keys} + LANES - 1) / LANES * LANES;
    {parallel}
    {{
        const std::unique_ptr<float[]> memory(new float[padded * ({depth} + {rows}) + 16]);
        float* packed = aligned(memory);
        float* scores = packed + padded * {depth};
        {shared}
        for (int64_t i = 0; i < {batch} * {heads}; ++i) {{
            const int64_t b = i / {heads}, h = i % {heads};
            const float* q = {q.start} + b * {q.stride[0]} + h * {q.stride[1]};
            const float* k = {k.start} + b * {k.stride[0]} + h * {k.stride[1]};
            const float* v = {v.start} + b * {v.stride[0]} + h * {v.stride[1]};
            const float* mask = {mask};
            float* out = {out.start} + b * {out.stride[0]} + h * {out.stride[1]};
            pack<{depth}>(k, {k.stride[2]}, {keys}, packed);
            int64_t n = 0;
            for (; n + {rows} <= {queries}; n += {rows})
                {answer};
            {rest}
        }}
    }}
"""

_ANSWER = """answer<{rows}, {depth}, {width}, {causal}>(
                    q + n * {q.stride[2]}, {q.stride[2]}, packed, v, {v.stride[2]},
                    {masked}, {across}, out + n * {out.stride[2]}, {out.stride[2]},
                    scores, n, {keys}, {scale}f)"""


def generate_for(op: Any) -> None:
    """Code is generated for calls op(q, k, v, mask, causal, scale) of [batch, head, position,
    channel]: 32-bit floats on CPU whose sizes are known, channels a multiple of 16. A mask is
    [batch, head, query, key], and each but the last may be 1."""

    def call(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
        batch, heads, queries, _ = map(int, q.get_size())
        width = int(v.get_size()[-1])
        size = [batch, heads, queries, width]
        stride = [queries * heads * width, width, heads * width, 1]
        write = functools.partial(_write, causal, scale)
        inputs = [realized(x) for x in (q, k, v, mask) if x is not None]
        return buffer("attention", inputs, size, stride, write)

    lower(op, call)


def _write(
    causal: bool, scale: float, inputs: Sequence[Tensor], out: Tensor, threads: int
) -> Source:
    q, k, v, *masks = inputs
    batch, heads, queries, depth = q.size
    rows = min(ROWS, queries)
    values: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": out, "batch": batch, "heads": heads, "queries": queries,
        "depth": depth, "rows": rows, "keys": k.size[2], "width": v.size[3],
        "causal": str(causal).lower(), "scale": repr(float(scale)), "rest": "",
        "parallel": f"#pragma omp parallel num_threads({threads})" if threads > 1 else "",
        "shared": "#pragma omp for" if threads > 1 else "",
    }  # fmt: skip
    values |= _masking(*masks)
    values["answer"] = _ANSWER.format(**values)
    if left := queries % rows:
        values["rest"] = _ANSWER.format(**values | {"rows": left}) + ";"
    return Source(_PARTS, _BODY.format(**values))


def _masking(mask: Tensor | None = None) -> dict[str, Any]:
    """Where a head's mask begins, where that of a query does, and how far the next one's is."""
    if mask is None:
        return {"mask": "nullptr", "masked": "nullptr", "across": 0}
    steps = [0 if size == 1 else step for size, step in zip(mask.size, mask.stride, strict=True)]
    start = f"{mask.start} + b * {steps[0]} + h * {steps[1]}"
    return {"mask": start, "masked": f"mask + n * {steps[2]}", "across": steps[2]}
