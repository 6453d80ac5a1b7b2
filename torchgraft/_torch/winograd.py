"""Winograd's convolution F(2x2, 3x3) as code of Inductor's: 16 products where there were 36.

Each 4 x 4 pixels that four outputs see are transformed, multiplied with transformed weights, and
transformed back, a block of such tiles at a time, so that what lies between stays in a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torchgraft._torch.written import Source, Tensor, channels_last, image, lower

ROWS = 8
"""Tiles at a time: with two vectors of channels, 16 sums in registers. 12 and 14 were as fast."""
BLOCK = 64
"""Tiles between transforms. 16 to 64 took the same time to within 3 %."""
PANEL, LEAST = 32, 16
"""Channels whose weights lie together, two vectors, and how many may be left of them: one."""

_PRODUCT = """
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

_PARTS = """
struct Shape {
    int64_t outs, depth, high, wide, rows, columns, pad_y, pad_x;  // of outputs, inputs, padding
    int64_t x_image, x_row, x_pixel, y_image, y_row, y_pixel, o_image, o_row, o_pixel;  // strides
    int64_t tiles_y() const { return (rows + 1) / 2; }
    int64_t tiles_x() const { return (columns + 1) / 2; }
};

// Planes [16][tile][channel], apart so that a cache can hold a piece of each.
struct Block {
    int64_t first, count;  // tiles
    float *data, *sums;
    int64_t step, data_plane, sums_plane;
};

// One tile of B'dB, where `load(y, x, c)` gives channels from c on of a pixel.
template <typename Load>
inline void spread(const Shape& s, float* to, int64_t plane, const Load& load) {
    for (int64_t c = 0; c < s.depth; c += LANES) {
        Vec half[16];
        c10::ForcedUnroll<4>{}([&](auto j) {
            const Vec p = load(0, j, c), q = load(1, j, c), r = load(2, j, c), t = load(3, j, c);
            half[j] = p - r, half[4 + j] = q + r, half[8 + j] = r - q, half[12 + j] = q - t;
        });
        c10::ForcedUnroll<4>{}([&](auto i) {
            const Vec p = half[4 * i], q = half[4 * i + 1], r = half[4 * i + 2];
            (p - r).store(to + (4 * i) * plane + c);
            (q + r).store(to + (4 * i + 1) * plane + c);
            (r - q).store(to + (4 * i + 2) * plane + c);
            (q - half[4 * i + 3]).store(to + (4 * i + 3) * plane + c);
        });
    }
}

inline void gather(const Shape& s, const Block& b, const float* x) {
    for (int64_t t = 0; t < b.count; ++t) {
        const int64_t id = b.first + t, n = id / (s.tiles_y() * s.tiles_x());
        const int64_t y = 2 * (id / s.tiles_x() % s.tiles_y()) - s.pad_y;
        const int64_t z = 2 * (id % s.tiles_x()) - s.pad_x;
        const float* from = x + n * s.x_image + y * s.x_row + z * s.x_pixel;
        float* to = b.data + t * b.step;
        const auto pixel = [&](int64_t i, int64_t j, int64_t c) {
            return Vec::loadu(from + i * s.x_row + j * s.x_pixel + c);
        };
        if (y >= 0 && z >= 0 && y + 4 <= s.high && z + 4 <= s.wide)
            spread(s, to, b.data_plane, pixel);
        else
            spread(s, to, b.data_plane, [&](int64_t i, int64_t j, int64_t c) {
                const bool is_in = y + i >= 0 && y + i < s.high && z + j >= 0 && z + j < s.wide;
                return is_in ? pixel(i, j, c) : Vec(0.0f);
            });
    }
}

// A'mA of each tile, then bias, sum and what follows, for WIDTH channels.
template <int WIDTH>
inline void scatter(const Shape& s, const Block& b, const float* bias, const float* other,
                    float* out) {
    for (int64_t t = 0; t < b.count; ++t) {
        const int64_t id = b.first + t, n = id / (s.tiles_y() * s.tiles_x());
        const int64_t y = 2 * (id / s.tiles_x() % s.tiles_y()), z = 2 * (id % s.tiles_x());
        for (int64_t c = 0; c < WIDTH; c += LANES) {
            const float* from = b.sums + t * WIDTH + c;
            const auto sum = [&](int64_t i) { return Vec::loadu(from + i * b.sums_plane); };
            Vec half[8];
            c10::ForcedUnroll<4>{}([&](auto j) {
                const Vec q = sum(4 + j), r = sum(8 + j);
                half[j] = sum(j) + q + r, half[4 + j] = q - r - sum(12 + j);
            });
            const Vec base = bias ? Vec::loadu(bias + c) : Vec(0.0f);
            const auto put = [&](int64_t i, int64_t j, Vec value) {
                if (y + i >= s.rows || z + j >= s.columns) return;
                value = value + base;
                if (other)
                    value = value + Vec::loadu(other + n * s.o_image + (y + i) * s.o_row +
                                               (z + j) * s.o_pixel + c);
                value = then(value);
                value.store(out + n * s.y_image + (y + i) * s.y_row + (z + j) * s.y_pixel + c);
            };
            c10::ForcedUnroll<2>{}([&](auto i) {
                const Vec q = half[4 * i + 1], r = half[4 * i + 2];
                put(i, 0, half[4 * i] + q + r);
                put(i, 1, q - r - half[4 * i + 3]);
            });
        }
    }
}

// Outputs of WIDTH channels; REST is what is left of the last block's tiles.
template <int ROWS, int REST, int WIDTH>
inline void panel(const Shape& s, const Block& b, const float* weight, const float* bias,
                  const float* other, float* out) {
    for (int64_t i = 0; i < 16; ++i, weight += s.depth * WIDTH) {
        const float* data = b.data + i * b.data_plane;
        float* sums = b.sums + i * b.sums_plane;
        int64_t t = 0;
        for (; t + ROWS <= b.count; t += ROWS)
            product<ROWS, WIDTH>(data + t * b.step, b.step, weight, s.depth, nullptr, 0,
                                 sums + t * WIDTH, WIDTH);
        if constexpr (REST > 0)
            if (t < b.count)
                product<REST, WIDTH>(data + t * b.step, b.step, weight, s.depth, nullptr, 0,
                                     sums + t * WIDTH, WIDTH);
    }
    scatter<WIDTH>(s, b, bias, other, out);
}

// Panels of WIDTH channels, and of NARROW that may be left.
template <int ROWS, int REST, int WIDTH, int NARROW>
inline void convolve(const Shape& s, const Block& b, const float* x, const float* weight,
                     const float* bias, const float* other, float* out) {
    gather(s, b, x);
    int64_t k = 0;
    for (; k + WIDTH <= s.outs; k += WIDTH)
        panel<ROWS, REST, WIDTH>(s, b, weight + k * 16 * s.depth, bias ? bias + k : nullptr,
                                       other ? other + k : nullptr, out + k);
    if constexpr (NARROW > 0)
        panel<ROWS, REST, NARROW>(s, b, weight + k * 16 * s.depth, bias ? bias + k : nullptr,
                                        other ? other + k : nullptr, out + k);
}

inline float* aligned(const std::unique_ptr<float[]>& memory) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}
"""

_BODY = """
    constexpr int64_t step = {depth} + LANES, data_plane = {block} * step + LANES;
    constexpr int64_t sums_plane = {block} * {width} + LANES;
    const Shape shape{{{shape}}};
    {parallel}
    {{
        const std::unique_ptr<float[]> memory(new float[16 * (data_plane + sums_plane) + 16]);
        float* data = aligned(memory);
        {shared}
        for (int64_t first = 0; first < {tiles}; first += {block}) {{
            const Block block{{first, std::min<int64_t>({block}, {tiles} - first), data,
                               data + 16 * data_plane, step, data_plane, sums_plane}};
            convolve<{rows}, {rest}, {width}, {narrow}>(
                shape, block, {x.start}, {weight.start}, {bias}, {other}, {out.start});
        }}
    }}
"""


def generate_for(op: Any, then: Any) -> None:
    """Code is generated for calls op(x, weight, bias, other, padding, follows, size, stride) of
    images [count, channel, row, column]: 32-bit floats on CPU whose sizes are known, channels
    multiples of 16. The result lies channels last, whatever its type in the graph says. `then`
    gives the C++ of what follows."""

    def call(
        x: Any, weight: Any, bias: Any, other: Any, pads: Sequence[int], follows: str, *out: Any
    ) -> Any:
        write = functools.partial(_write, pads=pads, then=then(follows))
        return image("winograd", [channels_last(x), weight, bias, other], out[0], write)

    lower(op, call)


def _write(
    has_bias: bool,
    has_other: bool,
    inputs: Sequence[Tensor],
    out: Tensor,
    threads: int,
    *,
    pads: Sequence[int],
    then: str,
) -> Source:
    x, weight, *more = inputs
    bias = more[0].start if has_bias else "nullptr"
    other = more[-1] if has_other else None
    _, depth, high, wide = x.size
    count, outs, rows, columns = out.size
    tiles = count * tiles_of(rows, columns)
    groups = -(-tiles // ROWS)  # for each thread, and no more of them than a block's
    blocks = max(-(-groups * ROWS // BLOCK), min(threads, groups))
    steps = (*_steps(x), *_steps(out), *(_steps(other) if other else (0, 0, 0)))
    shape = (outs, depth, high, wide, rows, columns, *pads, *steps)
    body = _BODY.format(
        x=x, weight=weight, bias=bias, other=other.start if other else "nullptr", out=out,
        shape=", ".join(map(str, shape)), depth=depth, tiles=tiles,
        block=-(-groups // blocks) * ROWS, rows=ROWS, rest=tiles % ROWS,
        width=PANEL, narrow=outs % PANEL,
        parallel=f"#pragma omp parallel num_threads({threads})" if threads > 1 else "",
        shared="#pragma omp for" if threads > 1 else "",
    )  # fmt: skip
    return Source(_PRODUCT + then + _PARTS, body)


def tiles_of(rows: int, columns: int) -> int:
    """The squares of four outputs in an image, those counted of which a part lies beyond."""
    return -(-rows // 2) * -(-columns // 2)


def _steps(image: Tensor) -> tuple[int, int, int]:
    each, _, row, pixel = image.stride
    return each, row, pixel
