"""Convolutions as code of Inductor's: for some outputs, 32 channels at a time, the sums over all
that they see stay in registers. Where each pixel lies is looked up, so nothing is copied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torchgraft._torch.written import Source, Tensor, channels_last, image, lower

ROWS = (8, 7, 6, 5)
"""Outputs at a time: with two vectors of channels, up to 16 sums in registers."""
BLOCK = 16
"""Of those, for which weights are read once."""
PANEL, LANES = 32, 16
"""Channels whose weights lie together, and those of a vector."""
FEW = 8
"""Channels, fewer than which are a loop that ends before it has begun: the image is copied."""

_PARTS = """
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
THEN
struct Shape {
    int64_t total, image, columns, outs;  // outputs: all, of an image, in a row, their channels
    int64_t high, wide, x_image, x_row, x_pixel;
    int64_t taps, depth;  // pixels of the kernel, and what each adds
    int64_t step_y, step_x, pad_y, pad_x, grow_y, grow_x, reach_y, reach_x;
};

// Groups of ROWS outputs; the last one begins where that many are left.
template <int ROWS>
inline int64_t start_of(const Shape& s, int64_t group) {
    return std::min(group * ROWS, s.total - ROWS);
}

// Where the pixels of groups lie: [group][pixel of the kernel][output].
template <int ROWS>
__attribute__((noinline)) void look(const Shape& s, const float* x, const float* zeros,
                                    int64_t first, int64_t end, const float** found) {
    for (int64_t group = first; group < end; ++group, found += s.taps * ROWS) {
        const int64_t start = start_of<ROWS>(s, group), i = start % s.image;
        int64_t n = start / s.image, row = i / s.columns, column = i % s.columns;
        for (int64_t r = 0; r < ROWS; ++r) {
            const int64_t y = row * s.step_y - s.pad_y, z = column * s.step_x - s.pad_x;
            const float** to = found + r;
            for (int64_t v = y; v < y + s.reach_y; v += s.grow_y)
                for (int64_t u = z; u < z + s.reach_x; u += s.grow_x, to += ROWS) {
                    const bool is_in = v >= 0 && v < s.high && u >= 0 && u < s.wide;
                    *to = is_in ? x + n * s.x_image + v * s.x_row + u * s.x_pixel : zeros;
                }
            if (++column < s.columns) continue;
            column = 0;
            if (++row * s.columns < s.image) continue;
            row = 0, ++n;
        }
    }
}

// COUNT channels, for which there are weights of WIDTH.
template <int ROWS, int WIDTH, int COUNT>
__attribute__((noinline)) void panel(const Shape& s, const float* const* found, int64_t first,
                                     int64_t end, const float* weight, int64_t skip,
                                     const float* bias, const float* other, float* out) {
    constexpr int COLS = WIDTH / LANES;
    for (int64_t group = first; group < end; ++group) {
        Vec sums[ROWS * COLS], row[COLS], one;
        c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) { sums[i] = Vec(0.0f); });
        const float* w = weight;
        for (int64_t t = 0; t < s.taps; ++t, found += ROWS) {
            const float* a[ROWS];
            c10::ForcedUnroll<ROWS>{}([&](auto r) { a[r] = found[r] + skip; });
            for (int64_t k = 0; k < s.depth; ++k, w += WIDTH)
                c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) {
                    constexpr int r = i / COLS, c = i % COLS;
                    if constexpr (r == 0) row[c] = Vec::loadu(w + c * LANES);
                    if constexpr (c == 0) one = Vec(a[r][k]);
                    sums[i] = at::vec::fmadd(one, row[c], sums[i]);
                });
        }
        const int64_t start = start_of<ROWS>(s, group) * s.outs;
        c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) {
            constexpr int r = i / COLS, c = i % COLS;
            constexpr int64_t some = std::min<int64_t>(LANES, COUNT - c * LANES);
            const auto read = [&](const float* from) {
                return some == LANES ? Vec::loadu(from) : Vec::loadu(from, some);
            };
            const int64_t at = start + r * s.outs + c * LANES;
            Vec value = sums[i];
            if (bias) value = value + read(bias + c * LANES);
            if (other) value = value + read(other + at);
            value = then(value);
            some == LANES ? value.store(out + at) : value.store(out + at, some);
        });
    }
}
"""

_BODY = """
    static const float zeros[{zeros}] = {{}};
    const Shape shape{{{shape}}};
    {parallel}
    {{
        const std::unique_ptr<const float*[]> found(new const float*[{block} * {taps} * {rows}]);
        {shared}
        for (int64_t task = 0; task < {blocks} * {parts}; ++task) {{
            const int64_t first = task / {parts} * {block};
            const int64_t end = std::min<int64_t>({lines}, first + {block});
            look<{rows}>(shape, {x.start}, zeros, first, end, found.get());
            const int64_t part = task % {parts}, count = {panels} * {groups};
            for (int64_t p = part * count / {parts}; p < (part + 1) * count / {parts}; ++p) {{
                const int64_t group = p / {panels}, n = p % {panels} * {panel};
                const float* w = {weight.start} + (group * {filled} + n) * {sums};
                const int64_t k = group * {each} + n, skip = group * {depth};
                const float* bias = {bias};
                const float* other = {other};
                {choice}
            }}
        }}
    }}
"""
_COPY = """
    // Few channels: an image with zeros around it, channels last, so that a row of the kernel sees
    // numbers beside each other.
    const std::unique_ptr<float[]> memory(new float[{count} * {image}]());
    {parallel}
    for (int64_t line = 0; line < {count} * {high}; ++line) {{
        const int64_t n = line / {high}, y = line % {high};
        const float* from = {x.start} + n * {x.stride[0]} + y * {x.stride[2]};
        float* to = memory.get() + n * {image} + (y + {pads[0]}) * {row} + {pads[1]} * {depth};
        for (int64_t c = 0; c < {depth}; ++c)
            for (int64_t x = 0; x < {wide}; ++x)
                to[x * {depth} + c] = from[c * {x.stride[1]} + x * {x.stride[3]}];
    }}
"""
_CALL = (
    "panel<{rows}, {width}, {count}>(shape, found.get(), first, end, w, skip, bias, other, "
    "{out.start} + k);"
)


def filled(outs: int) -> int:
    """Channels that there are weights for where there are so many: vectors are full."""
    return sum(count * width for count, width, _ in panels(outs))


def panels(outs: int) -> list[tuple[int, int, int]]:
    """How many panels there are, of how many channels each is, and how many of those are real:
    whole ones first, then what is left."""
    whole, left = divmod(outs, PANEL)
    kinds = [(whole, PANEL, PANEL), (1, PANEL if left > LANES else LANES, left)]
    return [kind for kind in kinds if kind[0] and kind[2]]


def generate_for(op: Any, then: Any) -> None:
    """Code is generated for calls op(x, weight, bias, other, kernel, steps, pads, dilation, groups,
    follows, size, stride) of images [count, channel, row, column], 32-bit floats on CPU whose sizes
    are known. The result lies channels last. `then` gives the C++ of what follows."""

    def call(x: Any, weight: Any, bias: Any, other: Any, *how: Any) -> Any:
        from torch._inductor import ir

        *steps, follows, size, _ = how
        few = int(x.get_size()[1]) < FEW
        data = ir.ExternKernel.realize_input(x) if few else channels_last(x)
        write = functools.partial(_write, how=steps, then=then(follows))
        return image("convolution", [data, weight, bias, other], size, write)

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
    [high, wide], steps, pads, grown, groups = how
    count, outs, rows, columns = out.size
    depth = x.size[1] // groups
    taps, inner = high * wide, depth
    threaded = f"#pragma omp parallel num_threads({threads})" if threads > 1 else ""
    copy = ""
    if x.size[1] < FEW:
        copy, x, pads = _copied(x, pads, threads)
    if groups == grown[1] == 1 and pads[1] == 0 and x.stride[3] == depth:
        taps, inner = high, wide * depth  # pixels of a row of the kernel lie beside each other
    total, each = count * rows * columns, outs // groups
    some = at_a_time(total)
    lines = -(-total // some)
    block = -(-lines // max(-(-lines // BLOCK), min(threads, lines)))
    blocks = -(-lines // block)
    kinds = panels(each)
    number = sum(count for count, _, _ in kinds)
    shape = (
        total, rows * columns, columns, outs, *x.size[2:], x.stride[0], *x.stride[2:],
        taps, inner, *steps, *pads, *grown, high * grown[0], taps // high * grown[1],
    )  # fmt: skip
    values: dict[str, Any] = {
        "x": x, "weight": weight, "out": out, "rows": some, "lines": lines, "block": block,
        "blocks": blocks, "taps": taps, "sums": taps * inner, "depth": depth, "groups": groups,
        "each": each, "filled": filled(each), "panels": number, "panel": PANEL,
        "zeros": max(inner, x.size[1]), "shape": ", ".join(map(str, shape)),
        "parts": min(-(-threads // blocks), number * groups),
        "bias": f"{more[0].start} + k" if has_bias else "nullptr",
        "other": f"{more[-1].start} + k" if has_other else "nullptr",
        "parallel": threaded, "shared": "#pragma omp for" if threads > 1 else "",
    }  # fmt: skip
    calls = [_CALL.format(width=width, count=real, **values) for _, width, real in kinds]
    if len(calls) > 1:
        calls = [f"if (n < {each // PANEL * PANEL}) {calls[0]}\n else {calls[1]}"]
    return Source(_PARTS.replace("THEN", then), copy + _BODY.format(choice=calls[0], **values))


def _copied(x: Tensor, pads: Sequence[int], threads: int) -> tuple[str, Tensor, Sequence[int]]:
    """An image with zeros around it, channels last; how it is made, and what is left to pad."""
    count, depth, high, wide = x.size
    tall, row = high + 2 * pads[0], (wide + 2 * pads[1]) * depth
    parallel = f"#pragma omp parallel for num_threads({threads})" if threads > 1 else ""
    text = _COPY.format(
        x=x, count=count, depth=depth, high=high, wide=wide, image=tall * row, row=row, pads=pads,
        parallel=parallel,
    )  # fmt: skip
    size, stride = (count, depth, tall, row // depth), (tall * row, 1, row, depth)
    return text, Tensor("memory.get()", size, stride), (0, 0)


def at_a_time(total: int) -> int:
    """Of how many outputs at a time the fewest are computed twice. With fewer than 7, weights are
    read as often as a cache can give them: 1 x 7 on 17 x 17, five at a time, 632 us, seven 589."""
    return min((n for n in ROWS if n <= total), key=lambda n: -(-total // n) * max(n, 7))
