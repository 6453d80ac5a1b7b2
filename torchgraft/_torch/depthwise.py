"""Convolutions of each channel by itself as code of Inductor's: sums for some outputs of a row, a
vector of channels at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torchgraft._torch.written import Source, Tensor, channels_last, image, lower

ROWS = 8
"""Outputs at a time, at most: as many sums in registers as keep the multipliers busy."""

_PARTS = """
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
THEN
struct Shape {
    int64_t rows, columns, depth, high, wide, x_image, x_row, x_pixel;
    int64_t kernel_y, kernel_x, step_y, step_x, pad_y, pad_x, grow_y, grow_x;
};

// ROWS outputs from `at` on, from rows [top, end) of the kernel. `where(y, x, r)` is what output r
// sees at a pixel of it.
template <int ROWS, typename Where>
inline void sums_of(const Shape& s, int64_t top, int64_t end, const Where& where,
                    const float* weight, const float* bias, const float* other, float* out) {
    const auto some = [&](int64_t c, auto whole) {
        const auto read = [&](const float* from) {
            return whole ? Vec::loadu(from + c) : Vec::loadu(from + c, s.depth - c);
        };
        Vec sums[ROWS];
        const Vec base = bias ? read(bias) : Vec(0.0f);
        c10::ForcedUnroll<ROWS>{}([&](auto r) { sums[r] = base; });
        for (int64_t y = top; y < end; ++y)
            for (int64_t x = 0; x < s.kernel_x; ++x) {
                const Vec w = read(weight + (y * s.kernel_x + x) * s.depth);
                c10::ForcedUnroll<ROWS>{}([&](auto r) {
                    sums[r] = at::vec::fmadd(w, read(where(y, x, r)), sums[r]);
                });
            }
        c10::ForcedUnroll<ROWS>{}([&](auto r) {
            const int64_t at = r * s.depth;
            Vec value = sums[r];
            if (other) value = value + read(other + at);
            value = then(value);
            whole ? value.store(out + at + c) : value.store(out + at + c, s.depth - c);
        });
    };
    int64_t c = 0;
    for (; c + LANES <= s.depth; c += LANES) some(c, std::true_type{});
    if (c < s.depth) some(c, std::false_type{});
}

// One row of outputs, of which neighbours see pixels that lie STEP numbers apart.
template <int ROWS, int64_t STEP>
__attribute__((noinline)) void line(const Shape& s, int64_t number, const float* x,
                                    const float* zeros, const float** found, const float* weight,
                                    const float* bias, const float* other, float* out) {
    const int64_t n = number / s.rows, y = number % s.rows * s.step_y - s.pad_y;
    int64_t top = 0, end = s.kernel_y;
    while (top < end && y + top * s.grow_y < 0) ++top;
    while (top < end && y + (end - 1) * s.grow_y >= s.high) --end;
    const int64_t first = number * s.columns * s.depth;
    for (int64_t start = 0; start < s.columns; start += ROWS) {
        const int64_t at = std::min(start, s.columns - ROWS), z = at * s.step_x - s.pad_x;
        const float* from = x + n * s.x_image + y * s.x_row + z * s.x_pixel;
        const int64_t last = z + (ROWS - 1) * s.step_x + (s.kernel_x - 1) * s.grow_x;
        const float* more = other ? other + first + at * s.depth : nullptr;
        float* to = out + first + at * s.depth;
        if (z >= 0 && last < s.wide) {
            const auto where = [&](int64_t v, int64_t u, int64_t r) {
                return from + v * s.grow_y * s.x_row + u * s.grow_x * s.x_pixel + r * STEP;
            };
            sums_of<ROWS>(s, top, end, where, weight, bias, more, to);
            continue;
        }
        for (int64_t v = top; v < end; ++v)
            for (int64_t u = 0; u < s.kernel_x; ++u)
                for (int64_t r = 0; r < ROWS; ++r) {
                    const int64_t column = z + r * s.step_x + u * s.grow_x;
                    found[(v * s.kernel_x + u) * ROWS + r] =
                        column < 0 || column >= s.wide
                            ? zeros
                            : from + v * s.grow_y * s.x_row + u * s.grow_x * s.x_pixel + r * STEP;
                }
        const auto where = [&](int64_t v, int64_t u, int64_t r) {
            return found[(v * s.kernel_x + u) * ROWS + r];
        };
        sums_of<ROWS>(s, top, end, where, weight, bias, more, to);
    }
}
"""

_BODY = """
    static const float zeros[{depth}] = {{}};
    const Shape shape{{{shape}}};
    {parallel}
    for (int64_t number = 0; number < {lines}; ++number) {{
        const float* found[{taps} * {rows}];
        line<{rows}, {step}>(shape, number, {x.start}, zeros, found, {weight.start}, {bias},
                             {other}, {out.start});
    }}
"""


def generate_for(op: Any, then: Any) -> None:
    """Code is generated for calls op(x, weight, bias, other, kernel, steps, pads, dilation, groups,
    follows, size, stride) of images [count, channel, row, column], 32-bit floats on CPU whose sizes
    are known; weights are [pixel of the kernel][channel], one group for each channel. The result
    lies channels last. `then` gives the C++ of what follows."""

    def call(x: Any, weight: Any, bias: Any, other: Any, *how: Any) -> Any:
        *steps, _, follows, size, _ = how
        write = functools.partial(_write, how=steps, then=then(follows))
        return image("depthwise", [channels_last(x), weight, bias, other], size, write)

    lower(op, call)


def _write(
    has_bias: bool,
    has_other: bool,
    inputs: Sequence[Tensor],
    out: Tensor,
    threads: int,
    *,
    how: Sequence[Any],
    then: str,
) -> Source:
    x, weight, *more = inputs
    kernel, steps, pads, grown = how
    count, depth, rows, columns = out.size
    whole, _, row, pixel = x.stride
    shape = (
        rows, columns, depth, *x.size[2:], whole, row, pixel, *kernel, *steps, *pads, *grown
    )  # fmt: skip
    body = _BODY.format(
        x=x, weight=weight, out=out, depth=depth, shape=", ".join(map(str, shape)),
        lines=count * rows, taps=kernel[0] * kernel[1], step=steps[1] * pixel,
        rows=min(range(min(ROWS, columns), 0, -1), key=lambda n: -(-columns // n) * max(n, 5)),
        bias=more[0].start if has_bias else "nullptr",
        other=more[-1].start if has_other else "nullptr",
        parallel=f"#pragma omp parallel for num_threads({threads})" if threads > 1 else "",
    )  # fmt: skip
    return Source(_PARTS.replace("THEN", then), body)
