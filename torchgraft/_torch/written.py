"""Kernels written by hand in what Inductor generates. torch 2.11 to 2.13."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as a kernel sees it: where it begins, in C++, and how it is laid out."""

    start: str
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """C++ of one kernel: functions, in a namespace of its own, and a body that may use them."""

    parts: str
    body: str


Write = Callable[[Sequence[Tensor], Tensor, int], Source]
"""The source for given inputs, output and threads."""


def realized(value: Any) -> Any:
    """A value in memory, its last dimension dense."""
    from torch._inductor import ir

    laid = ir.ExternKernel.realize_input(value)
    storage, layout = ir.as_storage_and_layout(laid, freeze=False)
    if isinstance(layout, ir.FlexibleLayout):
        storage.data.freeze_layout()  # or it would become what is best for whoever made it
    if laid.get_stride()[-1] == 1 or laid.get_size()[-1] == 1:
        return laid
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.copy_input(laid))


def dense(value: Any) -> Any:
    """A value in memory without gaps, such as weights and biases."""
    from torch._inductor import ir

    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(value))


def channels_last(value: Any, *, dense: bool = False) -> Any:
    """An image in memory, the channels of a pixel beside each other; `dense`, and nothing else."""
    from torch._inductor import ir

    kernel = ir.ExternKernel
    laid = kernel.require_channels_last(kernel.realize_input(value))
    _, depth, _, wide = sizes = laid.get_size()
    plain = [sizes[2] * wide * depth, 1, wide * depth, depth]
    if list(laid.get_stride()) == plain if dense else laid.get_stride()[1] == 1:
        return laid
    return kernel.require_channels_last(kernel.copy_input(laid))


def buffer(
    name: str, inputs: Sequence[Any], size: Sequence[int], stride: Sequence[int], write: Write
) -> Any:
    """What a kernel makes of `inputs`, which are in memory; their sizes are known. Nothing is
    fused with it."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    device, dtype = inputs[0].get_device(), inputs[0].get_dtype()
    layout = ir.FixedLayout(device, dtype, list(size), list(stride))
    made = _template()(name, list(inputs), layout, write).generate().output_node()
    V.graph.no_fuse_buffer_names.add(made.get_name())
    return made


def image(
    name: str, inputs: Sequence[Any], size: Sequence[int], write: Callable[..., Source]
) -> Any:
    """What a kernel makes of an image, weights, and a bias and an image to add, where there are
    such: an image of that size that lies channels last. `write` is told first which there are."""
    data, weight, bias, other = inputs
    given = [data, dense(weight)]
    given += [] if bias is None else [dense(bias)]
    given += [] if other is None else [channels_last(other, dense=True)]
    _, outs, high, wide = size
    told = functools.partial(write, bias is not None, other is not None)
    return buffer(name, given, size, [high * wide * outs, 1, wide * outs, outs], told)


def lower(op: Any, how: Callable[..., Any]) -> None:
    """Inductor calls `how` for calls of `op`, with values for tensors."""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(how)


_SHARED = re.compile(r"^namespace \w+_parts \{(.*?)^\}  // parts$", re.MULTILINE | re.DOTALL)


def shared(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """The functions of all kernels, each once, and the kernels' sources without them. They are
    templates for the most part, which a compiler would work out anew in every namespace."""
    found: dict[str, int] = {}

    def named(match: re.Match[str]) -> str:
        number = found.setdefault(match[1], len(found))
        space = match[0].split(maxsplit=2)[1]
        return f"namespace {space} {{ using namespace ::parts_{number}; }}"

    left = [_SHARED.sub(named, source) for source in sources]
    return [f"namespace parts_{number} {{{text}}}\n" for text, number in found.items()], left


@functools.cache
def _template() -> Any:
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.utils import parallel_num_threads

    class Written(CppTemplate):
        def __init__(self, name: str, inputs: Any, layout: Any, write: Write) -> None:
            super().__init__(name, inputs, layout, parallel_num_threads())
            self.write = write

        def render(self, kernel: Any, template_buffer_node: Any = None, **_: Any) -> str:  # type: ignore[override]
            out: Any = template_buffer_node or self.output_node
            named = {f"X{i}": node for i, node in enumerate(self.input_nodes)}
            head = kernel.def_kernel(inputs=named, outputs={"Y": out})
            *inputs, output = (_tensor(kernel, node) for node in (*self.input_nodes, out))
            source = self.write(inputs, output, self.num_threads)
            space = f"{kernel.kernel_name}_parts"
            return (
                f"{self.header().getvalue()}\n#include <limits>\n#include <memory>\n"
                f"namespace {space} {{{source.parts}}}  // parts\n"
                f'extern "C"\n{head}\n{{\n    using namespace {space};\n{source.body}}}\n'
            )

    return Written


def _tensor(kernel: Any, node: Any) -> Tensor:
    size, stride = (tuple(map(int, numbers)) for numbers in (node.get_size(), node.get_stride()))
    return Tensor(f"(&{kernel.index(node, [0] * len(size))})", size, stride)
