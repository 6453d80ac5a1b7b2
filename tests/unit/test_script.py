"""The Python that `to_module` writes computes what the TorchScript program computes."""

import copy
import io
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from torchgraft.errors import UnsupportedScript
from torchgraft.fx.script import Branch, Translated, to_module

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()


def script(module: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def trace(module: Any, *inputs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, inputs, check_trace=False)


def reload(scripted: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


def same(got: Any, want: Any) -> None:
    assert isinstance(got, type(want)) or (isinstance(want, tuple) and isinstance(got, tuple))
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, equal_nan=True)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    else:
        assert got == want


def check(scripted: Any, *inputs: Any, **keywords: Any) -> Translated:
    """The same results as the original and as the original after a save and a load."""
    pairs = [(scripted, scripted)]
    if isinstance(scripted, torch.jit.ScriptModule):
        pairs = [(copy.deepcopy(scripted), scripted), (reload(scripted), reload(scripted))]
    for original, source in pairs:  # two of each: a call may change the state
        translated = to_module(source)
        for _ in range(2):
            torch.manual_seed(1)
            want = original(*copy.deepcopy(inputs), **keywords)
            torch.manual_seed(1)
            same(translated.module(*copy.deepcopy(inputs), **keywords), want)
    return to_module(scripted)


def kinds(translated: Translated) -> list[tuple[str, str]]:
    return [(branch.kind, branch.on) for branch in translated.branches]


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Block(4, 4), Block(4, 8, 2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("form", ["trace", "script"])
def test_resnet(form: str, training: bool) -> None:
    model, x = ResNet().train(training), torch.randn(2, 3, 9, 9)
    scripted = script(model) if form == "script" else trace(model, x)
    translated = check(scripted, torch.randn(3, 3, 9, 9))
    original = dict(scripted.named_parameters())
    for name, parameter in translated.module.named_parameters():
        assert parameter is original.pop(name)
    assert not original
    assert translated.module.state_dict().keys() == scripted.state_dict().keys()
    exported = torch.export.export(to_module(reload(scripted)).module.eval(), (x,))
    assert set(exported.state_dict) == set(scripted.state_dict())


def test_loaded_parameters_share_memory_and_are_left_as_they_are() -> None:
    loaded = reload(script(nn.Linear(2, 2)))
    module = to_module(loaded).module
    assert type(loaded.weight) is Tensor
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.requires_grad
    with torch.no_grad():
        loaded.weight.fill_(3)
        loaded.bias.zero_()
    same(module(torch.ones(1, 2)), torch.full((1, 2), 6.0))
    module.load_state_dict(nn.Linear(2, 2).state_dict())
    x = torch.randn(1, 2)
    same(module(x), loaded(x))


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    for source in (script(model), reload(script(model))):
        module = to_module(source).module
        assert module.get_parameter("0.weight") is module.get_parameter("1.weight")
        assert module.state_dict().keys() == model.state_dict().keys()


class Shapes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        b, h = x.shape[0], x.shape[1]
        return (
            x.mul(2.5).round_().view(b * 2, -1),
            x.reshape(h // 2, -1)[:, :b],
            x.new_zeros(b, h * 2 - 1),
            x / b,
            x * (b / 3),
            x[: b % 3 + b**2 - 7, : (9 - b)],
            x[: int(h / 4)],
        )


def test_sizes_of_a_trace_stay_dynamic() -> None:
    traced = trace(Shapes(), torch.randn(2, 8))
    translated = check(traced, torch.randn(4, 8))
    assert "NumToTensor" not in translated.source
    for scripted in (traced, reload(traced)):
        for strict in (False, True):
            exported = torch.export.export(
                to_module(scripted).module,
                (torch.randn(4, 8),),
                dynamic_shapes={"x": {0: Dim.AUTO, 1: Dim.AUTO}},
                strict=strict,
            )
            assert len(exported.range_constraints) == 2
            x = torch.randn(6, 12)
            same(exported.module()(x)[:6], Shapes()(x)[:6])


def test_wrapped_sizes_round_as_float32_tensors_do() -> None:
    def scaled(x: Tensor) -> Tensor:
        size = torch.floor(torch.tensor(0.7) * x.shape[0])
        return torch.zeros(int(size), x.shape[0])

    def third(x: Tensor) -> Tensor:
        return x * (x.shape[0] / 3)

    for n in (10, 20, 30):
        check(trace(third, torch.ones(3)), torch.ones(n))
        check(trace(third, torch.ones(3, dtype=torch.int32)), torch.ones(n, dtype=torch.int32))
        check(trace(scaled, torch.ones(10)), torch.ones(n))


@pytest.mark.parametrize("shape", [(3,), ()])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float64, torch.bool])
def test_number_times_tensor_promotes_like_the_original(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = torch.tensor(8.8, dtype=torch.float64)
            self.register_buffer("b", torch.tensor(8.8, dtype=torch.float64))
            self.d = torch.tensor(7.7, dtype=torch.float64)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            # self.c: the JIT turns a 0-dim constant into a number, and so the dtype changes
            return x * 8.8, x + 3, x * self.c, x * self.b, x / 2, x // 2, torch.maximum(x, self.d)

    x = torch.ones(shape, dtype=dtype)
    translated = check(trace(Numbers(), x), x)
    assert "torch.ops.aten.mul.Tensor(x, 8.8)" in translated.source


class DataIf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        if x.sum() < -1:
            return x - 1
        return x + 1


def test_if_on_data() -> None:
    for value in (1.0, -1.0, -0.1):
        translated = check(script(DataIf()), torch.full((3,), value))
    assert set(kinds(translated)) == {("if", "data")}
    assert translated.branches[0].line.endswith("test_script.py:" + str(line_with("x.sum() > 0")))


def line_with(text: str) -> int:
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


class ArgumentIf(nn.Module):
    def forward(self, x: Tensor, double: bool = True, mask: Tensor | None = None) -> Tensor:
        if double:
            x = x * 2
        if mask is not None:
            x = x + mask
        return x


def test_if_on_an_argument() -> None:
    x = torch.ones(2)
    translated = check(script(ArgumentIf()), x)
    assert kinds(translated) == [("if", "argument")] * 2
    assert translated.source.startswith("def forward(self, x, double=True, mask=None):")
    check(script(ArgumentIf()), x, double=False, mask=x)
    exported = torch.export.export(translated.module, (x, False, x))
    same(exported.module()(x, False, x), x + x)


class Loops(nn.Module):
    def forward(self, x: Tensor, n: int) -> tuple[Tensor, int, list[Tensor]]:
        i = 0
        while bool(x.sum() < 100) and i < n:
            x = x.abs() * 2 + 1
            i += 1
        kept: list[Tensor] = []
        for j in range(int(x[0]) % 5 + 1):
            x = x + j
            kept.append(x)
            if j == 3:
                break
            if j == 1:
                continue
            x = x * 2
        return x, i, kept


def test_loops() -> None:
    for n in (0, 2, 9):
        translated = check(script(Loops()), torch.randn(4), n)
    assert ("loop", "data") in kinds(translated)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(4, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        seen: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            out["layer" + str(i)] = x
            seen.append(x)
        for name, layer in self.by_name.items():
            out[name] = layer(x)
        rows: list[Tensor] = []
        for i in range(x.size(0)):
            rows.append(x[i] * i)
        i = 0
        while i < 3:
            x = x + i
            i += 1
        out["all"] = torch.cat(seen, dim=-1)
        out["rows"] = torch.stack(rows)
        out["x"] = x
        return out


def test_lists_dicts_and_unrolled_loops() -> None:
    x = torch.randn(3, 4)
    translated = check(script(Counted()), x)
    assert kinds(translated) == [("loop", "shape")]
    for strict in (False, True):
        exported = torch.export.export(translated.module, (x,), strict=strict)
        same(exported.module()(x), translated.module(x))
    same(torch.compile(translated.module, backend="eager", fullgraph=True)(x), translated.module(x))


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def forward(self, x: Tensor, n: int) -> Tensor:
        a, b, c, d = 0, 0, 0, 0
        for _ in range(6):
            if a > 2:
                x = x + 1
            a, b, c, d = b, c, d, n
        self.seen.append(1)
        if len(self.seen) > 3:
            x = x * 2
        return x


def test_what_a_branch_hangs_on_goes_round_loops_and_through_state() -> None:
    for n in (1, 5):
        translated = check(script(Carried()), torch.ones(2), n)
    assert kinds(translated) == [("if", "argument")] * 2


class Early(nn.Module):
    def forward(self, x: Tensor, k: int) -> tuple[Tensor, int]:
        for i in range(k):
            if i > 2:
                return x, i
            x = x + i
        if x.size(0) > 2:
            return x * 3, -1
        return x, k


def test_early_return() -> None:
    for k, n in ((1, 2), (1, 3), (5, 3)):
        translated = check(script(Early()), torch.ones(n), k)
    assert ("if", "shape") in kinds(translated)
    assert ("loop", "argument") in kinds(translated)


class Point(NamedTuple):
    where: Tensor
    count: int


class Named(nn.Module):
    def forward(self, x: Tensor) -> tuple[Point, Tensor]:
        return Point(x + 1, 3), x


def test_named_tuple() -> None:
    translated = check(script(Named()), torch.ones(2))
    assert isinstance(translated.module(torch.ones(2))[0], Point)


class State(nn.Module):
    calls: int

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.calls = 0
        self.table = [1, 2]
        self.plain = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += self.table[0]
        before = self.count
        self.count = self.count * 2
        return x + self.count + before + self.calls + self.plain


def test_buffer_update() -> None:
    translated = check(script(State()), torch.ones(2))
    assert set(dict(translated.module.named_buffers())) == {"count", "plain"}
    assert set(translated.module.state_dict()) == {"count"}


class Text(nn.Module):
    def forward(self, x: Tensor, s: str) -> tuple[str, str, str, list[str], str, bool]:
        if s == "bad":
            raise ValueError(f"no {s}: {x.size(0)}")
        assert x.dim() == 1, "flat only"
        shown = "{} of {}".format(s, x.size(0))  # noqa: UP032
        return shown, "%d-%s" % (3, s), s.upper() + "'\"\n", s.split(","), s[1:], "b" in s  # noqa: UP031


class Search(nn.Module):
    def forward(self, s: str) -> tuple[list[int], list[bool], str]:
        where = [s.find("c"), s.rfind("c"), s.index("c"), s.rindex("c"), s.count("c")]
        where += [s.find("c", 0, -2), s.find("c", -1), s.count("c", 0, 2), [1, 2, 1].count(1)]
        return where, [s.endswith("c"), s.startswith("a", 0, 1)], "%s" % s  # noqa: UP031


def test_searches_go_to_the_end_of_the_string() -> None:
    check(script(Search()), "abc")


def test_strings_and_raise() -> None:
    translated = check(script(Text()), torch.ones(2), "a,b")
    with pytest.raises(ValueError, match="no bad: 2"):
        translated.module(torch.ones(2), "bad")
    with pytest.raises(Exception, match="flat only"):
        translated.module(torch.ones(2, 2), "a")


def test_custom_op() -> None:
    @torch.library.custom_op("torchgraft_test::scale_add", mutates_args=())
    def scale_add(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return x + alpha * y

    @scale_add.register_fake
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return torch.empty_like(x)

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.torchgraft_test.scale_add(x, x, 0.5)

    x = torch.ones(2)
    for scripted in (script(Custom()), trace(Custom(), x)):
        translated = check(scripted, x)
        assert "torch.ops.torchgraft_test.scale_add.default(x, x, 0.5)" in translated.source
        torch.export.export(translated.module, (x,))


class Scalars(nn.Module):
    def forward(self, a: int, b: int, f: float) -> tuple[float, int, int, int, float, float]:
        return a / b, -a // b, -a % b, int(f), round(f), float(a**b)

    @torch.jit.export
    def unused(self, x: Tensor) -> Tensor:
        return x


class MoreScalars(nn.Module):
    def forward(self, a: int, b: int, f: float) -> list[float]:
        small, large = min(a, b), max(f, 2.0)
        bits = (a & b) + (a | b) + (a ^ b) + (a << 2)
        rounded = math.floor(-f) + math.ceil(f) + math.sqrt(f) + abs(-a)
        return [float(small), large, float(bits), rounded, f**2, math.inf, float(a < b)]


class Containers(nn.Module):
    def forward(self, x: Tensor, given: list[int]) -> tuple[list[int], list[int], list[int], bool]:
        a = [i * 2 for i in given]
        a.append(3)
        a.extend([4, 5])
        a += [7]
        a.insert(0, a.pop())
        a.reverse()
        b = sorted(a)
        b[0] = 100
        del b[1]
        table = {"p": 1, "q": 2}
        table["r"] = table.get("zz", 4)
        for value in table.values():
            b.append(value)
        shape = list(x.shape)
        shape[0] = 9
        return a, b + given[1:] + shape, [len(table), table.pop("p")], x.shape == [2, 3]


class Kinds(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[bool]]:
        y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        facts = [x.dtype == torch.float32, x.is_cuda, x.is_floating_point(), x.dim() == 2]
        like = torch.ones_like(x, dtype=torch.int32)
        with torch.no_grad():
            z = x.to(torch.float64).contiguous(memory_format=torch.contiguous_format)
        return y, torch.tensor([1, 2]), torch.tensor(2.5), like, z.to(x), facts


@torch.jit.script
class Total:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, n: int) -> None:
        self.value += n


class Classes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        total = Total(1)
        for i in range(3):
            total.add(i)
        return x + total.value, total.value


class Items(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, float, bool]:
        return x[: int(n)], float(n), bool(n)


class Fork(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        future = torch.jit.fork(torch.relu, x)
        return torch.jit.wait(future) + x


class Indexing(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x = x.clone()
        x[x > 0] = 1.0
        x[0] = 5
        x[:, 1:] += 2
        values, _ = x.max(dim=1)
        left, right = x.chunk(2, 1)
        return x, x[:, None, ::2], values, left * right, x.masked_fill(x > 1, float("-inf"))


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Scalars(), (7, 3, -2.5)),
        (MoreScalars(), (7, 3, 2.5)),
        (Containers(), (torch.ones(2, 3), [1, 2, 3])),
        (Kinds(), (torch.ones(2, 3),)),
        (Classes(), (torch.ones(2),)),
        (Items(), (torch.ones(4), torch.tensor(2))),
        (Items(), (torch.ones(4), torch.tensor(2.7))),
        (Fork(), (torch.randn(3),)),
        (Indexing(), (torch.randn(3, 4),)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_script_semantics(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    check(script(module), *inputs)


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.inner(x)


def test_lstm() -> None:
    model, x = Holder(nn.LSTM(4, 5, 2, bidirectional=True)).eval(), torch.randn(2, 3, 4)
    for scripted in (script(model), trace(model, x)):
        translated = check(scripted, x)
        for loaded in (scripted, reload(scripted)):
            exported = torch.export.export(to_module(loaded).module, (x,))
            assert set(exported.state_dict) == set(model.state_dict())
            assert not exported.constants  # the list of weights is parameters, not copies
    with pytest.raises(UnsupportedScript, match="has no forward"):
        to_module(script(nn.LSTM(2, 2)))
    assert all(branch.on == "shape" for branch in translated.branches)


@pytest.mark.parametrize("form", ["trace", "script"])
def test_attention(form: str) -> None:
    model, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(5, 2, 8)
    scripted = script(model) if form == "script" else trace(model, x, x, x)
    check(scripted, x, x, x)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    scripted = script(encoder) if form == "script" else trace(encoder, x)
    translated = check(scripted, x)
    for strict in (False, True):
        exported = torch.export.export(translated.module, (x,), strict=strict)
        same(exported.module()(x), translated.module(x))


def test_functions() -> None:
    @torch.jit.script
    def times(x: Tensor, n: int = 2) -> tuple[Tensor, int]:
        return x * n, n

    check(times, torch.ones(2))
    check(times, torch.ones(2), n=5)
    check(trace(lambda x: torch.relu(x) * 2, torch.randn(3)), torch.randn(3))


def test_source_is_shown_in_tracebacks() -> None:
    translated = to_module(script(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError) as caught:
        translated.module(torch.ones(3))
    frame = caught.traceback[-2].frame
    assert str(frame.code.path).endswith(">") or "torchgraft script" in str(frame.code.path)
    assert "torch.ops.aten.linear.default(input, self.weight, self.bias)  # linear.py:" in (
        translated.source
    )


HOSTILE = "x\nimport os\nos.system('touch /tmp/torchgraft_owned')\n#"


def test_hostile_names_and_constants() -> None:
    graph = torch._C.parse_ir(
        """graph(%a : Tensor, %b : Tensor, %c : int):
        %one : int = prim::Constant[value=1]()
        %sum : Tensor = aten::add(%a, %b, %one)
        %out : Tensor = aten::mul(%sum, %c)
        return (%out)"""
    )
    for value, name in zip(graph.inputs(), ("torch", "len", "input"), strict=True):
        value.setDebugName(name)
    graph.findNode("aten::add").output().setDebugName("lambda")
    graph.findNode("aten::mul").output().setDebugName("self.os;import sys")
    translated = to_module(torch._C._create_function_from_graph("forward", graph))
    assert "lambda_1 = " in translated.source
    assert "import sys" not in translated.source
    got = translated.module(torch=torch.ones(2), len=torch.ones(2), input=3)
    same(got, torch.full((2,), 6.0))

    def text(x: Tensor, s: str) -> str:
        return s + "'''\\n\"\"\"{}"

    assert to_module(script(text)).module(torch.ones(1), HOSTILE).startswith(HOSTILE)

    holder = torch.jit.ScriptModule()
    holder._c._register_attribute("register_buffer", torch._C.TensorType.get(), torch.ones(1))
    holder.define("def forward(self, x: Tensor) -> Tensor:\n    return x + self.register_buffer\n")
    with pytest.raises(UnsupportedScript, match="'register_buffer' is taken"):
        to_module(holder)


def test_hostile_submodule_names() -> None:
    outer = nn.Module()
    hostile = HOSTILE.replace(".", "")
    outer.add_module(hostile, nn.Linear(2, 2))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(hostile, nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, hostile)(x)

    translated = to_module(trace(Outer(), torch.ones(1, 2)))
    assert "\nimport os" not in translated.source
    translated.module(torch.ones(1, 2))


class Python(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_what_has_no_translation_is_named() -> None:
    class Opaque(nn.Module):
        @torch.jit.ignore
        def inner(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(UnsupportedScript) as caught:
        to_module(script(Opaque()))
    assert caught.value.kind == "prim::PythonOp"
    assert "test_script.py:" in caught.value.line
    assert str(caught.value).endswith(
        "Keep this module in torch, or rewrite that line and script it again."
    )


def test_branch_is_data() -> None:
    assert Branch("if", "a.py:1", "data") == Branch("if", "a.py:1", "data")


@pytest.mark.slow
def test_bert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=50, return_dict=False,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    tokens = torch.randint(0, 50, (2, 7))
    traced = trace(model, tokens, torch.ones_like(tokens))
    other = torch.randint(0, 50, (3, 5))
    translated = check(traced, other, torch.ones_like(other))
    batch = {0: Dim.AUTO, 1: Dim.AUTO}
    exported = torch.export.export(
        translated.module, (tokens, torch.ones_like(tokens)), dynamic_shapes=(batch, batch)
    )
    same(exported.module()(other, torch.ones_like(other)), traced(other, torch.ones_like(other)))
