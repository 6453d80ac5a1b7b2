"""`Config`: everything a compile depends on, as one frozen value."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import BadValue, UnknownName

if TYPE_CHECKING:
    from torchgraft.convert.define import Converter
    from torchgraft.passes.pattern.define import Pattern
    from torchgraft.passes.registry import Registry

DUMP_FORMATS = ("txt", "py", "json", "dot", "svg", "pbtxt", "onnx")
STREAMS = ("auto", "off")
VERIFY = ("off", "each", "end", "pin")
MODES = ("eager", "default", "reduce-overhead", "max-autotune")
PRECISIONS = {
    "float32": (torch.float32, False),
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
    "mixed-float16": (torch.float16, True),
    "mixed-bfloat16": (torch.bfloat16, True),
}
"""What `Config.precision` may be: the type to compute in, and whether sensitive calls keep theirs.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How to compile. Immutable; `config.replace(mode=...)` gives a changed copy.

    >>> Config(mode="eager").replace(freeze=False).mode
    'eager'
    >>> Config(mode="fastest")
    Traceback (most recent call last):
    ...
    torchgraft.errors.UnknownName: Config.mode: unknown mode 'fastest'. ...
    """

    mode: str = "default"
    """`eager`: node by node on ATen. `default`: regions by Inductor. `reduce-overhead`: the same,
    in one captured CUDA graph on CUDA. `max-autotune`: ways to compile it are timed, and the
    fastest is kept."""
    freeze: bool = True
    """`graft.compile` only: copy the weights into the program and fold what depends on them alone.
    False keeps reading the module's own tensors, so that in-place changes are seen."""
    pre_passes: tuple[Callable[..., Any], ...] = ()
    """Passes `fn(gm, example_inputs, config)` or `@graft.fx_pass`, before the built-in ones."""
    post_passes: tuple[Callable[..., Any], ...] = ()
    """The same, after the built-in ones."""
    patterns: tuple[Pattern, ...] = ()
    """Patterns for this compile, after the registered ones."""
    fusions: bool = True
    """Use the fusions of `graft.fusions` that were measured to win (docs/patterns.md), in generated
    code, where neither a converter nor `torch_executed_ops` asks for one of their operators."""
    registry: Registry | None = None
    """Where passes and patterns are looked up; None: the registry of the surrounding scope."""
    converters: tuple[Converter, ...] = ()
    """`@graft.converter(..., register=False)`; they go before the registered ones, later first."""
    torch_executed_ops: tuple[Any, ...] = ()
    """Operators that run on ATen: names (`aten::relu`, `aten.add.Tensor`) or operators."""
    torch_executed_modules: tuple[Any, ...] = ()
    """Modules that run on ATen: a path (`layers.0`), a class or its name, or a regular expression
    that fits a whole path or qualified class name."""
    min_block_size: int = 1
    """Fewer nodes than this in a region: they run on ATen."""
    require_full_compilation: bool = False
    """Raise `NotCompiled`, with every culprit, where a node would run on ATen."""
    merge_branches: bool = True
    """Compute parallel branches of one shape with frozen weights (experts, towers, embedding
    tables) as one, where their products are small."""
    precision: str | None = None
    """The type to compute in: `float16`, `bfloat16` or `float32` for all floating-point calls,
    `mixed-float16` or `mixed-bfloat16` for all but the sensitive ones. Inputs and outputs keep
    their types, and so do custom operators. None: as the program says."""
    decompositions: Mapping[Any, Callable[..., Any]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    """Functions that take the place of operators while a program is traced, over torch's own."""

    streams: str | None = None
    """`auto`: independent branches go to streams of their own where a cost model says that it pays
    (docs/streams.md). `off`: only the streams that the program names. None: `auto` in the modes
    `reduce-overhead` and `max-autotune`, `off` in the others."""
    autotune_seconds: float = 60.0
    """`max-autotune` only: how long a compile may take with its measuring. What has not been tried
    by then stays as predicted, and the report says so."""
    stream_memory: float = 1.1
    """How much more memory a plan over several streams may keep alive than the same plan on one:
    beyond it, streams wait for each other. `float("inf")`: never wait for memory."""
    bucket_bytes: int = 64 << 10
    """Collectives of up to so many bytes may be done together, as one, where nothing has to wait
    for it; 0: none."""
    adversary: int | None = None
    """A seed: on the host, every stream pauses at random, so that whatever order the plan leaves
    open occurs. For tests."""
    alias_outputs: bool = False
    """With a captured CUDA graph: return its own outputs, which the next call overwrites, instead
    of copies."""
    verify: str = "off"
    """`each`: run the graph before and after every pass and converter, and raise `ResultChanged`
    where results differ. `end`: compare the compiled program with the captured graph. `pin`: both,
    but undo the rewrite, pin the node to ATen and go on. Costs compile time only."""
    verify_dir: str | None = None
    """Where scripts that reproduce a difference go; None: a temporary folder."""
    report: str | None = None
    """A folder: each program that is compiled leaves its report there, an HTML page."""
    dump: str | None = None
    """A folder: each program leaves its graph there, before the passes and after each that changed
    it, in numbered files."""
    dump_formats: tuple[str, ...] = ("txt", "py")
    """Which files: `txt`, `py` (runs again), `json`, `dot`, `svg`, `pbtxt` and `onnx` (Netron)."""
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Options for the code generator, as `torch.compile(options=...)` takes them."""
    cache_dir: str | os.PathLike[str] | None = None
    """`graft.compile` only: keep compiled programs in this folder, and use them again. A program
    is found by its graph, weights, passes, settings, versions and machine."""
    cache_bytes: int = 4 << 30
    """How large the cache may grow; the least recently used programs go first."""

    def __new__(cls, **fields: Any) -> Config:
        """Raise for a field that there is not; what there is, `__init__` takes."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise UnknownName("option", name, cls.__dataclass_fields__, where="Config")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UnknownName("mode", self.mode, MODES, where="Config.mode")
        for switch in (
            "freeze",
            "fusions",
            "require_full_compilation",
            "alias_outputs",
            "merge_branches",
        ):
            if not isinstance(getattr(self, switch), bool):
                raise BadValue(f"Config.{switch}", getattr(self, switch), "True or False")
        for field in ("pre_passes", "post_passes"):
            passes = getattr(self, field)
            if not isinstance(passes, (list, tuple)) or not all(map(callable, passes)):
                raise BadValue(f"Config.{field}", passes, "a list of functions")
            object.__setattr__(self, field, tuple(passes))
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UnknownName("precision", self.precision, PRECISIONS, where="Config.precision")
        if not isinstance(self.decompositions, Mapping):
            raise BadValue("Config.decompositions", self.decompositions, "operators to functions")
        object.__setattr__(self, "decompositions", MappingProxyType(dict(self.decompositions)))
        if self.verify not in VERIFY:
            raise UnknownName("check", self.verify, VERIFY, where="Config.verify")
        if self.streams is not None and self.streams not in STREAMS:
            raise UnknownName("choice", self.streams, STREAMS, where="Config.streams")
        if self.adversary is not None and type(self.adversary) is not int:
            raise BadValue("Config.adversary", self.adversary, "a whole number or None")
        budget = self.autotune_seconds
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget >= 0:
            raise BadValue("Config.autotune_seconds", budget, "a number of seconds")
        more = self.stream_memory
        if isinstance(more, bool) or not isinstance(more, (int, float)) or not more >= 1:
            raise BadValue("Config.stream_memory", more, "a number from 1 on")
        if type(self.bucket_bytes) is not int or self.bucket_bytes < 0:
            raise BadValue("Config.bucket_bytes", self.bucket_bytes, "a number of bytes")
        size = self.min_block_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadValue("Config.min_block_size", size, "a whole number from 1 on")
        for field in ("converters", "torch_executed_ops", "torch_executed_modules"):
            held = getattr(self, field)
            if not isinstance(held, (list, tuple)):
                raise BadValue(f"Config.{field}", held, "a list")
            object.__setattr__(self, field, tuple(held))
        for one in self.converters:
            if not hasattr(one, "ops"):
                raise BadValue("Config.converters", one, "what @graft.converter makes")
        if not isinstance(self.patterns, (list, tuple)):
            raise BadValue("Config.patterns", self.patterns, "a list of patterns")
        object.__setattr__(self, "patterns", tuple(self.patterns))
        if self.registry is not None and not hasattr(self.registry, "unregister"):
            raise BadValue("Config.registry", self.registry, "a graft.Registry")
        for field in ("report", "dump"):
            folder = getattr(self, field)
            if folder is not None and not isinstance(folder, (str, os.PathLike)):
                raise BadValue(f"Config.{field}", folder, "the path of a folder")
            object.__setattr__(self, field, None if folder is None else os.fspath(folder))
        if isinstance(self.dump_formats, str):
            raise BadValue("Config.dump_formats", self.dump_formats, "a list such as ['txt']")
        for name in self.dump_formats:
            if name not in DUMP_FORMATS:
                raise UnknownName("format", name, DUMP_FORMATS, where="Config.dump_formats")
        object.__setattr__(self, "dump_formats", tuple(self.dump_formats))
        if not isinstance(self.cache_dir, (str, os.PathLike, type(None))):
            raise BadValue("Config.cache_dir", self.cache_dir, "the path of a folder")
        if not isinstance(self.cache_bytes, int) or self.cache_bytes < 0:
            raise BadValue("Config.cache_bytes", self.cache_bytes, "a number of bytes")
        if not isinstance(self.inductor, Mapping):
            raise BadValue("Config.inductor", self.inductor, "a mapping of Inductor options")
        object.__setattr__(self, "inductor", MappingProxyType(_known(self.inductor)))

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in FIELDS}
        plain = {name: dict(fields[name]) for name in ("inductor", "decompositions")}
        return Config.of, ({**fields, **plain},)

    @property
    def captures(self) -> bool:
        """Whether a program on CUDA becomes one CUDA graph."""
        return self.mode in ("reduce-overhead", "max-autotune")

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed; an unknown field raises and suggests the nearest."""
        return Config.of({**{f: getattr(self, f) for f in FIELDS}, **changes})

    @staticmethod
    def given(config: object) -> Config:
        """What a caller passed as `config=`; None is the default one."""
        if config is None:
            return Config()
        if not isinstance(config, Config):
            raise BadValue("config", config, "a graft.Config")
        return config

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Config:
        """A Config from a plain mapping, such as `torch.compile(options=...)`."""
        return Config(**fields)


FIELDS = tuple(field.name for field in dataclasses.fields(Config))


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's options by their dotted names; `a-b` is read as `a_b`, as torch.compile does."""
    if not options:
        return {}
    from torchgraft._torch import generator

    known = generator.known_options()
    result = {name.replace("-", "_"): value for name, value in options.items()}
    for name in result:
        if name not in known:
            raise UnknownName("Inductor option", name, known, where="Config.inductor")
    return result
