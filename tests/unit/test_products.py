"""Who computes a product on CPU, the generator or a library; convolutions as products."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft as graft
from torchgraft import _torch
from torchgraft._torch import generator
from torchgraft.codegen import convolve, inductor, regions

aten = torch.ops.aten


def region(model: nn.Module, x: torch.Tensor, **fields: object) -> torch.fx.GraphModule:
    """The model's only region, as the generator gets it."""
    compiled = graft.compile(model, (x,), mode="eager", **fields)
    gm = compiled.graph.gm
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return regions.extract(gm, regions.Unit("", regions.Place("generated"), calls))[0]


def is_micro(gm: torch.fx.GraphModule) -> bool:
    return inductor._by_generator(inductor._products(gm))


@pytest.mark.parametrize(
    ("rows", "width", "expected"), [(1, 256, True), (6, 512, True), (8, 256, False), (16, 64, True)]
)
def test_few_rows_are_the_generators(
    monkeypatch: pytest.MonkeyPatch, rows: int, width: int, expected: bool
) -> None:
    monkeypatch.setattr(generator, "vendor", lambda: "")
    assert is_micro(region(nn.Linear(width, width), torch.randn(rows, width))) is expected


@pytest.mark.parametrize(
    ("vendor", "width", "expected"),
    [("amd", 256, True), ("intel", 256, True), ("amd", 768, True), ("intel", 768, False)],
)
def test_many_rows_are_the_generators_where_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, vendor: str, width: int, expected: bool
) -> None:
    monkeypatch.setattr(generator, "vendor", lambda: vendor)
    assert is_micro(region(nn.Linear(width, width), torch.randn(128, width))) is expected
    assert not is_micro(region(nn.ReLU(), torch.randn(128, width)))


def test_a_region_goes_with_most_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "vendor", lambda: "")

    class Both(nn.Module):
        def __init__(self, small: int) -> None:
            super().__init__()
            self.one = nn.Linear(64, small)
            self.two = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(x[:1]), self.two(x)

    x = torch.randn(64, 64)
    assert not is_micro(region(Both(64), x))
    assert is_micro(region(Both(64 * 128), x))


def test_weights_that_change_are_left_to_a_library() -> None:
    assert not is_micro(region(nn.Linear(64, 64), torch.randn(1, 64), freeze=False))


@pytest.mark.parametrize(
    ("vendor", "rows", "expected"), [("amd", 64, True), ("amd", 8, False), ("intel", 64, False)]
)
def test_large_products_are_onednns_where_mkl_is_not_at_home(
    monkeypatch: pytest.MonkeyPatch, vendor: str, rows: int, expected: bool
) -> None:
    monkeypatch.setattr(generator, "vendor", lambda: vendor)
    given: list[bool] = []
    plain = generator.freeze

    def freeze(gm: object, inputs: object, onednn: bool) -> object:
        given.append(onednn)
        return plain(gm, inputs, onednn)  # type: ignore[arg-type]

    monkeypatch.setattr(generator, "freeze", freeze)
    model, x = nn.Linear(256, 256).eval(), torch.randn(rows, 256)
    compiled = graft.compile(model, (x,))
    assert given == [expected]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_generated_products_are_right() -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    x = torch.randn(3, 48)
    compiled = graft.compile(model, (x,))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_product_that_only_a_library_has_does_not_spoil_its_region() -> None:
    """Both operands strided views: there is no generated product for those."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.view(40, 4, 16).transpose(0, 1) for t in self.project(x).chunk(3, -1))
            scores = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
            return torch.bmm(scores, v)

    model, x = Attention().eval(), torch.randn(40, 64)
    compiled = graft.compile(model, (x,))
    assert [launch.kernel for launch in compiled.plan.launches] == ["region0"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("constant", [True, False])
def test_a_batched_product_is_generated_where_its_weights_are_constant(
    monkeypatch: pytest.MonkeyPatch, constant: bool
) -> None:
    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(4, 32, 48))
            self.linear = nn.Linear(32, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.weights if constant else x.sin().transpose(1, 2).contiguous()
            return torch.bmm(x, weights).sum() + self.linear(x[0])

    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    monkeypatch.setattr(inductor, "FEW_FLOPS", 1)
    given: list[tuple[float, bool]] = []

    def generates(flops: float, is_constant: bool) -> bool:
        given.append((flops, is_constant))
        return is_constant

    monkeypatch.setattr(inductor, "_generates", generates)
    model, x = Batched().eval(), torch.randn(4, 24, 32)
    compiled = graft.compile(model, (x,))
    expected = [
        (2.0 * 24 * 32 * 48, True),
        (2.0 * 4 * 24 * 32 * (48 if constant else 24), constant),
    ]
    assert sorted(given) == sorted(expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_what_sees_a_product_in_other_dimensions_is_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LeViT normalises the rows of all batches, and then has batches again."""
    hf = pytest.importorskip("transformers")
    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    config = hf.LevitConfig(
        image_size=64, hidden_sizes=[128, 256, 384], num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1], key_dim=[16, 16, 16],
    )  # fmt: skip
    model, x = hf.LevitModel(config).eval().requires_grad_(False), torch.randn(1, 3, 64, 64)
    compiled = graft.compile(model, (x,))
    assert compiled.report.coverage == 1
    found, expected = compiled(x), model(x)
    for name in ("last_hidden_state", "pooler_output"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)


def test_what_gates_channels_is_a_product_also_among_large_convolutions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(16, 64, 3), nn.Conv2d(64, 64, 5)
            self.gate = nn.Sequential(
                nn.Conv2d(64, 8, 1, padding="valid"), nn.SiLU(), nn.Conv2d(8, 64, 1), nn.Sigmoid()
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.last(self.first(x).relu())
            return y * self.gate(y.mean((2, 3), keepdim=True))

    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    seen: list[int] = []
    plain = convolve.as_products

    def told(gm: torch.fx.GraphModule, mode: object) -> None:
        plain(gm, mode)
        seen.append(len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)))

    monkeypatch.setattr(convolve, "as_products", told)
    model, x = Gated().eval(), torch.randn(2, 16, 40, 40)
    compiled = graft.compile(model, (x,))
    assert seen == [2]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "blocks"), [(1, {1}), (3, {3}), (8, {8}), (16, {8}), (19, {8, 3})], ids=str
)
def test_a_product_has_code_for_the_rows_that_it_has(
    monkeypatch: pytest.MonkeyPatch, rows: int, blocks: set[int]
) -> None:
    import torch._inductor.compile_fx  # torch 2.11: its templates cannot be imported first
    from torch._inductor.codegen import cpp_micro_gemm
    from torch._inductor.codegen.common import KernelTemplate

    before = KernelTemplate._template_from_string, cpp_micro_gemm.create_micro_gemm
    sources: list[str] = []
    plain = cpp_micro_gemm.CppMicroGemmFP32Vec.codegen_define

    def define(self: object, kernel: object) -> str:
        sources.append(plain(self, kernel))
        return sources[-1]

    monkeypatch.setattr(cpp_micro_gemm.CppMicroGemmFP32Vec, "codegen_define", define)
    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    model, x = nn.Sequential(nn.Linear(24, 48), nn.ReLU()).eval(), torch.randn(rows, 24)
    compiled = graft.compile(model, (x,), inductor={"fx_graph_cache": False})
    if not sources:
        pytest.skip("this processor has another kernel for products")
    for source in sources:
        found = {int(block) for block in re.findall(r"_kernel<(\d+), \d+, accum", source)}
        assert found == blocks, source
    with torch.no_grad():
        expected = model.double()(x.double())
    torch.testing.assert_close(compiled(x).double(), expected, rtol=1e-5, atol=1e-5)
    after = KernelTemplate._template_from_string, cpp_micro_gemm.create_micro_gemm
    assert after == before


@pytest.mark.parametrize(("columns", "most"), [(3, 16), (16, 16), (27, 32), (48, 48), (50, 64)])
def test_a_product_has_code_for_the_columns_that_it_has(
    monkeypatch: pytest.MonkeyPatch, columns: int, most: int
) -> None:
    from torchgraft._torch import rows

    seen: list[Any] = []
    fit = rows._fit

    def told(gemm: Any, m: Any, n: Any) -> Any:
        seen.append((n, fit(gemm, m, n).register_blocking.block_n))
        return gemm

    monkeypatch.setattr(rows, "_fit", told)
    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    model, x = nn.Linear(24, columns).eval(), torch.randn(4, 24)
    compiled = graft.compile(model, (x,), inductor={"fx_graph_cache": False})
    assert seen
    assert all(n == columns and 0 < wide <= most for n, wide in seen)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "expected"), [(1, False), (6, False), (7, True)])
def test_gcc_is_asked_for_more_where_there_are_many_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, expected: bool
) -> None:
    """Other flags are another precompiled header, which takes gcc longer than a product."""
    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    given: list[object] = []
    plain = generator.compile_graph

    def spy(*args: object, **kwargs: object) -> object:
        given.append(kwargs["many_rows"])
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(generator, "compile_graph", spy)
    graft.compile(nn.Linear(24, 32).eval(), (torch.randn(rows, 24),))
    assert given == [expected]


def test_gcc_keeps_sums_in_registers() -> None:
    from torch._inductor import cpp_builder

    compiler = generator.has_compiler()
    assert compiler is not None
    with generator.gcc_flags():
        inside = cpp_builder.CppOptions(compiler=compiler).get_cflags()
    outside = cpp_builder.CppOptions(compiler=compiler).get_cflags()
    assert [flag for flag in inside if flag not in outside] == [f"-{f}" for f in generator._SCALARS]
    assert not generator._takes("no-such-compiler")


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 11)),
        (nn.Conv2d(5, 7, (3, 2), stride=(2, 1), padding=(0, 1), bias=False), (1, 5, 12, 9)),
        (nn.Conv2d(6, 4, 1), (1, 6, 7, 7)),
        (nn.Conv2d(6, 4, 1, stride=2, padding=1), (1, 6, 7, 7)),
        (nn.Conv2d(7, 4, (2, 5), stride=(1, 3)), (3, 7, 5, 14)),  # three vectors, cut off
        (nn.Conv2d(16, 8, 3, padding=1), (2, 16, 9, 5)),
        (nn.Conv2d(17, 8, (2, 3), stride=2), (1, 17, 9, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("after", [(), (nn.ReLU(),), (nn.ReLU(), nn.Flatten())], ids=len)
@pytest.mark.parametrize("lies", [torch.contiguous_format, torch.channels_last], ids=str)
def test_small_convolutions_are_products(
    monkeypatch: pytest.MonkeyPatch,
    layer: nn.Conv2d,
    size: tuple[int, ...],
    after: tuple[nn.Module, ...],
    lies: torch.memory_format,
) -> None:
    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    seen: list[torch.fx.Graph] = []
    plain = generator.compile_graph

    def spy(gm: torch.fx.GraphModule, *args: object, **kwargs: object) -> object:
        seen.append(gm.graph)
        return plain(gm, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(generator, "compile_graph", spy)
    model = nn.Sequential(layer, *after).eval()
    x = torch.randn(size).contiguous(memory_format=lies)
    compiled = graft.compile(model, (x,))
    [graph] = seen
    assert not graph.find_nodes(op="call_function", target=aten.convolution.default)
    with torch.no_grad():
        expected, found = model.double()(x.double()), compiled(x)
    model.float()
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_package_copies_what_few_channels_are_seen_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of what is computed and of a part of it, in one library."""
    monkeypatch.setattr(generator, "vendor", lambda: "amd")
    one, two = nn.Conv2d(3, 4, 3, padding=1).eval(), nn.Conv2d(4, 3, 2, stride=2).eval()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.two(self.one(x.sin()[:, 1:4])[..., 1:])
            return found

    model, x = Model(), torch.randn(2, 5, 8, 9)
    compiled = graft.compile(model, (x,))
    compiled.save(tmp_path / "model.graft")
    loaded = graft.load(tmp_path / "model.graft")
    with torch.no_grad():
        for program in (compiled, loaded):
            torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


def test_other_convolutions_are_a_librarys() -> None:
    def kept(layer: nn.Module, x: torch.Tensor, **fields: object) -> bool:
        gm = region(layer.eval(), x, **fields)
        convolve.as_products(gm, x_mode(gm))
        return bool(gm.graph.find_nodes(op="call_function", target=aten.convolution.default))

    x = torch.randn(1, 4, 16, 16)
    assert not kept(nn.Conv2d(4, 4, 3), x)
    assert kept(nn.Conv2d(4, 4, 3, groups=2), x)
    assert kept(nn.Conv2d(4, 4, 3, dilation=2), x)
    assert kept(nn.ConvTranspose2d(4, 4, 3), x)
    assert kept(nn.Conv2d(4, 4, 3).double(), x.double())
    assert kept(nn.Conv2d(4, 4, 3), x, freeze=False)
    assert kept(nn.Conv2d(64, 64, 3), torch.randn(1, 64, 32, 32))  # 66 million operations
    assert kept(nn.Sequential(nn.Conv2d(4, 64, 1), nn.Conv2d(64, 64, 3)), torch.randn(1, 4, 32, 32))


def x_mode(gm: torch.fx.GraphModule) -> object:
    return _torch.fake_mode_of([n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")])


@pytest.mark.parametrize(("front", "asks"), [("compile", False), ("backend", True)])
def test_code_asks_for_sizes_only_where_nobody_has(
    monkeypatch: pytest.MonkeyPatch, front: str, asks: bool
) -> None:
    given: list[dict[str, object]] = []
    plain = generator.compile_graph

    def spy(*args: object, options: dict[str, object], **kwargs: object) -> object:
        given.append(dict(options))
        return plain(*args, options=options, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(generator, "compile_graph", spy)
    x = torch.randn(3, 4)
    if front == "compile":
        run = graft.compile(torch.sin, (x,))
        with pytest.raises(graft.errors.InputMismatch):
            run(torch.randn(4, 3))  # the call has checked
        torch.testing.assert_close(run(torch.randn(4, 3).T * 0 + x), x.sin())
    else:
        run = torch.compile(torch.sin, backend="torchgraft")
    torch.testing.assert_close(run(x), x.sin())
    assert [options.get("size_asserts", True) for options in given] == [asks]


def test_code_still_asks_behind_a_kernel_of_somebody_elses() -> None:
    @torch.library.custom_op("products::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.T.clone(memory_format=torch.contiguous_format).T  # not as foretold

    @turned.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    compiled = graft.compile(lambda x: turned(x).relu() + 1, (torch.randn(3, 4),))
    with pytest.raises(AssertionError, match="stride"):
        compiled(torch.randn(3, 4))


class Part(nn.Module):
    """A product with a part of its weights, which lies somewhere in their memory."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.computed = computed
        self.weight = nn.Parameter(torch.randn(48, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight * 2 if self.computed else self.weight
        return nn.functional.linear(x, weight[16:32]).relu()


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(3, -1, -1), self.weight).relu()


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_a_part_of_computed_weights_is_that_part(mode: str) -> None:
    model, x = Part(computed=True), torch.randn(3, 16)
    compiled = graft.compile(model, (x,), mode=mode)
    torch.testing.assert_close(compiled(x), model(x).detach(), rtol=1e-4, atol=1e-5)


PACKED = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 20), nn.ReLU()), torch.float32),
    "half": (lambda: nn.Linear(16, 20).bfloat16(), torch.bfloat16),  # packed in pairs
    "part": (lambda: Part(computed=False), torch.float32),
    "computed part": (lambda: Part(computed=True), torch.float32),
    "batched": (Batched, torch.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_a_package_has_the_products_of_a_fresh_program_and_takes_new_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def generates(flops: float, is_constant: bool) -> bool:
        asked.append(flops)
        return True

    monkeypatch.setattr(inductor, "_generates", generates)
    make, dtype = PACKED[name]
    model, other, x = make().eval(), make().eval(), torch.randn(3, 16, dtype=dtype)
    with torch._inductor.config.patch(force_disable_caches=True):  # or nobody may ask
        compiled = graft.compile(model, (x,))
    fresh, asked = asked, []
    compiled.save(tmp_path / "model.graft")
    assert asked == fresh != []
    loaded = graft.load(tmp_path / "model.graft")
    assert torch.equal(loaded(x), compiled(x))  # the same code on the same numbers
    state = {key: inside(value) for key, value in other.state_dict().items()}
    for program in (loaded, graft.load(tmp_path / "model.graft", weights=state)):
        program.load_state_dict(state)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(program(x), other(x).detach(), **tolerance)


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor somewhere in other memory."""
    memory = torch.full((tensor.numel() + 9,), 1e6, dtype=tensor.dtype)
    memory[5:-4] = tensor.flatten()
    return memory[5:-4].view(tensor.shape)


@pytest.mark.slow
def test_a_region_with_a_product_of_two_values_is_generated_all_the_same() -> None:
    class Score(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ y

    model, args = Score(8, 8), (torch.randn(2, 8), torch.randn(8, 8))
    compiled = graft.compile(model, args)
    assert compiled.report.coverage == 1
    torch.testing.assert_close(compiled(*args), model(*args).detach())
