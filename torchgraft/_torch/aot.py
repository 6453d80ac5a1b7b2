"""Inductor's code as a shared library (AOTInductor): made and loaded. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import Flat, fake_mode_of, sizes
from torchgraft._torch.derived import Derived
from torchgraft._torch.generator import (
    GRAPH_IDS,
    Keep,
    device_of,
    freeze,
    gcc_flags,
    joint_passes,
    products,
    rebase,
)


def compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    path: str,
    folded: Callable[[GraphModule, Node, Tensor], None],
    keep: Keep,
    onednn: bool = False,
    generates: Callable[[float, bool], bool] | None = None,
) -> dict[str, Tensor]:
    """`compile_graph` for inference into a shared library at `path`, which holds no constants.

    Gives the tensors that are to be bound to it, by the library's names. No code depends on their
    values, only on what their types say; `folded` is told how each one came about that was folded,
    or packed for a generated product.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    mode = fake_mode_of(inputs)
    settings = {
        "cpp_wrapper": True,
        "always_keep_tensor_constants": True,  # or small ones become literals
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.embed_kernel_binary": True,
        "aot_inductor.output_path": path,
        "aot_inductor.metadata": {},  # torch writes to it, and it is part of a hash of settings
        # One piece of memory a call: many are given back to the system, which takes as long to give
        # them again, page by page, as MobileNet's kernels take.
        "memory_planning": device_of(gm, inputs).type == "cpu",
    }
    frozen = any("weight" in node.meta for node in gm.graph.nodes)
    settings |= {"freezing": True, "freezing_discard_parameters": False} if frozen else {}
    constants: dict[str, Tensor] = {}
    with (
        products(generates),
        config.patch({**settings, **options}),
        tracing(TracingContext(mode)),
        V.set_aot_compilation(True),
        config.patch(compile_fx.get_cpp_wrapper_config()),  # on CUDA: tuned now, kernels kept
        gcc_flags(library=True),
        sizes.unassumed(),
        _watched_folds(folded),
        _watched_constants(constants),
    ):
        gm = _without_values(gm, inputs, keep)
        extra: dict[str, Any] = {}
        if frozen:
            # For a library, torch leaves MKL out: a weight that MKL packed cannot be moved, and so
            # not be saved. Here each is packed where the library is loaded.
            gm, extra = freeze(gm, inputs, onednn)
        rebase(gm, folded)
        output = next(iter(reversed(gm.graph.nodes)))
        output.meta["user_visible_output_idxs"] = [
            i for i, value in enumerate(output.args[0]) if isinstance(value, Node)
        ]
        allow, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        try:
            with Derived() as derived:
                compile_fx.compile_fx_inner(
                    gm,
                    inputs,
                    cudagraphs=BoxedBool(False),
                    graph_id=next(GRAPH_IDS),
                    is_inference=True,
                    cpp_wrapper=True,
                    **extra,
                )
        finally:
            mode.allow_non_fake_inputs = allow
    for tensor in constants.values():
        if (steps := derived.steps(tensor)) is not None:
            folded(steps, steps.graph.output_node().args[0], tensor)
    made = pathlib.Path(path)
    for nodes in made.parent.glob("*.wrapper.json"):  # calls that go through the dispatcher
        nodes.rename(made.with_suffix(".json"))
    return constants


def _without_values(gm: GraphModule, inputs: Sequence[Any], keep: Keep) -> GraphModule:
    """The joint passes with constants as inputs: they fold by value what happens to be uniform."""
    held: dict[str, tuple[str, Any]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        if isinstance(node.meta.get("val"), Tensor):
            with gm.graph.inserting_before(_first_call(gm)):
                lifted = gm.graph.placeholder(f"lifted_{node.name}")
            lifted.meta = dict(node.meta)
            held[str(lifted.target)] = (str(node.target), node.meta)
            node.replace_all_uses_with(lifted)
            gm.graph.erase_node(node)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    gm = joint_passes(gm, [*inputs, *values[len(inputs) :]], keep)
    for node in gm.graph.find_nodes(op="placeholder")[len(inputs) :]:
        target, node_meta = held[str(node.target)]
        with gm.graph.inserting_before(node):
            constant = gm.graph.create_node("get_attr", target)
        constant.meta = dict(node_meta)
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _first_call(gm: GraphModule) -> Any:
    return next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))


@contextlib.contextmanager
def _watched_folds(folded: Callable[[GraphModule, Node, Tensor], None]) -> Iterator[None]:
    from torch._inductor import constant_folding

    original = constant_folding.replace_node_with_constant

    def replace(gm: Any, node: Any, constant: Any = None, name: Any = None) -> None:
        if constant is not None:
            folded(gm, node, constant)
        original(gm, node, constant, name)

    constant_folding.replace_node_with_constant = replace
    try:
        yield
    finally:
        constant_folding.replace_node_with_constant = original


_LAST_ERROR = "static thread_local std::string g_aoti_last_error;"
_KEPT_ERROR = """static std::string& graft_last_error() {
  static thread_local std::string* const text = new std::string;
  return *text;
}
#define g_aoti_last_error graft_last_error()
"""


@contextlib.contextmanager
def _watched_constants(constants: dict[str, Tensor]) -> Iterator[None]:
    """Collect what a library's constants are; the compiled artefact does not tell.

    A thread that owes a library a destructor keeps it mapped for as long as the thread lives, and
    the text of the last error, which every thread has that calls the library, has one. Here it is
    never destroyed (torch 2.13).
    """
    from torch._inductor.codecache import AotCodeCompiler

    original = AotCodeCompiler.compile

    def compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
        constants.update(graph.constants)
        code, *others = args
        return original(graph, code.replace(_LAST_ERROR, _KEPT_ERROR), *others, **kwargs)

    AotCodeCompiler.compile = compile  # type: ignore[method-assign]
    try:
        yield
    finally:
        AotCodeCompiler.compile = original  # type: ignore[method-assign]


def load(path: str, device: torch.device, constants: Mapping[str, Tensor]) -> Flat:
    """The function of a library that `compile` made, with its constants bound, not copied."""
    from torch._C import _aoti

    runner: Any
    if device.type == "cpu":
        runner = _aoti.AOTIModelContainerRunnerCpu(path, _CONTEXTS)
    else:
        runner = _alone(path, device)
    if constants:
        aliases = {name: tensor.detach() for name, tensor in constants.items()}
        runner.update_constant_buffer(aliases, False, True, True)
        weakref.finalize(runner, _empty, list(aliases.values()))
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        return _on_device(runner.run, device)
    return runner.run  # type: ignore[no-any-return]


def _alone(path: str, device: torch.device) -> Any:
    """The runner of a library that does without a container's own turns: those wait for the call
    before to end on the device, and ask for that while a graph is captured. One call at a time.

    Only torch's loader of packages gives such a runner to Python, so the library goes into one.
    """
    from torch._C import _aoti

    if device.type == "cuda":
        # A library takes memory at once; without an allocator the process ends.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="torchgraft-") as folder:
        package = os.path.join(folder, "region.pt2")
        about = json.dumps({"AOTI_DEVICE_KEY": device.type})
        with zipfile.ZipFile(package, "w") as file:
            place = "region/data/aotinductor/model/region"
            file.write(path, f"{place}.so")
            file.writestr(f"{place}.cpp", "")  # what the library was made of; gives the name below
            file.writestr(f"{place}_metadata.json", about)
            if os.path.exists(nodes := path.removesuffix(".so") + ".json"):
                file.write(nodes, f"{place}.json")
        index = -1 if device.index is None else device.index
        return _aoti.AOTIModelPackageLoader(package, "model", True, 1, index)


def _on_device(run: Flat, device: torch.device) -> Flat:
    """A library runs on the current stream of the current device, whatever device it is for."""

    def guarded(args: list[Any]) -> Sequence[Any]:
        with torch.cuda.device(device):
            return run(args)

    return guarded


def _empty(aliases: Sequence[Tensor]) -> None:
    """Let go of what constants refer to. A container keeps a handle of each that it never frees
    (`MaybeOwningAtenTensorHandle`, torch 2.11 to 2.13), so that the weights would stay for good."""
    from torch.utils._python_dispatch import _disable_current_modes

    # Garbage may be collected in a trace, and there within a kernel of a fake tensor.
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        _no_kernel_of_meta(),
        torch.no_grad(),
    ):
        for alias in aliases:
            if alias.layout == torch.strided:
                alias.set_()  # type: ignore[call-overload]
            else:
                alias.data = torch.zeros(1).to_mkldnn()


@contextlib.contextmanager
def _no_kernel_of_meta() -> Iterator[None]:
    """Operators take the kernels of their tensors' devices, also while a fake tensor has sent those
    of this thread to `meta`."""
    sent = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(False)
    try:
        yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(sent)


_CONTEXTS = 4
"""How many calls of one CPU region run at the same time; the others wait."""
