"""What each output of a convolution sees, copied: the rows of a product, for images of few
channels. Inductor copies those pixel by pixel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torchgraft._torch.written import Source, Tensor, buffer, lower

_PARTS = """
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();

// Whole vectors: what is written too far is written again by whoever comes next, up to `end`.
template <int64_t LENGTH>
inline void copy(const float* from, float* to, const float* end) {
    for (int64_t i = 0; i < LENGTH; i += LANES) {
        const Vec some = Vec::loadu(from + i);
        if (to + i + LANES <= end)
            some.store(to + i);
        else
            some.store(to + i, std::min(LANES, LENGTH - i));
    }
}
"""

_BODY = """
    constexpr int64_t row = {wide} * {depth};
    const std::unique_ptr<float[]> memory(new float[{high} * row + LANES]());  // zeros around
    float* image = memory.get();
    float* to = {out.start};
    const float* end = to + {total};
    for (int64_t n = 0; n < {count}; ++n) {{
        for (int64_t y = 0; y < {height}; ++y)
            for (int64_t c = 0; c < {depth}; ++c) {{
                const float* from =
                    {x.start} + n * {x.stride[0]} + c * {x.stride[1]} + y * {x.stride[2]};
                float* line = image + (y + {pads[0]}) * row + {pads[1]} * {depth} + c;
                for (int64_t x = 0; x < {width}; ++x) line[x * {depth}] = from[x * {x.stride[3]}];
            }}
        for (int64_t y = 0; y < {rows}; ++y)
            for (int64_t x = 0; x < {columns}; ++x)
                for (int64_t k = 0; k < {kernel[0]}; ++k, to += {kernel[1]} * {depth})
                    copy<{kernel[1]} * {depth}>(
                        image + (y * {steps[0]} + k) * row + x * {steps[1]} * {depth}, to, end);
    }}
"""


def generate_for(op: Any) -> None:
    """Code is generated for calls op(x, kernel, steps, pads) of an image [count, channel, row,
    column], 32-bit floats on CPU whose sizes are known: [output, pixel of the kernel, channel]."""

    def call(x: Any, kernel: Sequence[int], steps: Sequence[int], pads: Sequence[int]) -> Any:
        from torch._inductor import ir

        image = ir.ExternKernel.realize_input(x)
        count, depth, *sides = map(int, x.get_size())
        rows, columns = _outputs(sides, kernel, steps, pads)
        size = [count * rows * columns, kernel[0] * kernel[1] * depth]
        write = functools.partial(_write, kernel, steps, pads)
        return buffer("patches", [image], size, [size[1], 1], write)

    lower(op, call)


def _outputs(*numbers: Sequence[int]) -> list[int]:
    return [
        (side + 2 * pad - seen) // step + 1 for side, seen, step, pad in zip(*numbers, strict=True)
    ]


def _write(
    kernel: Sequence[int],
    steps: Sequence[int],
    pads: Sequence[int],
    inputs: Sequence[Tensor],
    out: Tensor,
    threads: int,
) -> Source:
    [x] = inputs
    count, depth, height, width = x.size
    rows, columns = _outputs([height, width], kernel, steps, pads)
    body = _BODY.format(
        x=x, out=out, count=count, depth=depth, height=height, width=width, rows=rows,
        columns=columns, kernel=kernel, steps=steps, pads=pads, high=height + 2 * pads[0],
        wide=width + 2 * pads[1], total=out.size[0] * out.size[1],
    )  # fmt: skip
    return Source(_PARTS, body)
