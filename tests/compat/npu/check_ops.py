"""Torch's own samples of its operators, on the device and on the CPU."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.feature(
    "torch_npu", "simulated device: torch's own samples of its operators (op_db), with gradients"
)

RANDOM = (
    "dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "geometric",
    "cauchy", "empty", "rrelu", "lowrank", "fractional", "multi_head", "jiter",
)  # fmt: skip
# Sparse tensors are not on the device; a split is asked for with indices of the host; views into
# the middle of a storage are other views of a copy; a copy to pinned memory is not waited for.
ELSEWHERE = ("sparse", "tensor_split", "as_strided", "to")


def there(value: Any) -> Any:
    def move(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return one.detach().npu().requires_grad_(one.requires_grad)

    return pytree.tree_map(move, value)


def here(value: Any) -> Any:
    return pytree.tree_map(
        lambda one: one.detach().cpu() if isinstance(one, torch.Tensor) else one, value
    )


def tensors(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_flatten(value)[0]
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]


def samples(
    op: Any, dtype: torch.dtype, grad: bool, most: int | None
) -> Iterator[tuple[Any, Any, Any]]:
    """The first ones that the CPU takes: input, arguments, and what comes out."""
    for sample in list(op.sample_inputs("cpu", dtype, requires_grad=grad))[:most]:
        args = (sample.input, *sample.args), sample.kwargs
        if sample.kwargs.get("dropout_p"):
            continue
        try:
            yield (*args, op(*args[0], **args[1]))
        except (RuntimeError, ValueError, NotImplementedError):
            continue


def compare(
    dtype: torch.dtype, grad: bool, share: float = 1.0, most: int | None = None
) -> tuple[int, dict[str, str]]:
    """How many samples agree, and the operators that do not; of a share of the operators."""
    agree, wrong = 0, {}
    half = dtype.itemsize == 2  # whose statistics are floats on a device, and halves on the CPU
    close = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 1e-4, "atol": 1e-4}
    for op in random.Random(0).sample(op_db, int(len(op_db) * share)):
        if dtype not in op.dtypes or (grad and not op.supports_autograd):
            continue
        if op.name in ELSEWHERE or any(word in op.name for word in (*RANDOM, *ELSEWHERE[:2])):
            continue
        for args, kwargs, expected in samples(op, dtype, grad, most):
            moved, options = there((args, kwargs))
            options = {k: "npu" if k == "device" else v for k, v in options.items()}
            try:
                found = op(*moved, **options)
                torch.testing.assert_close(
                    here(found), here(expected), equal_nan=True, check_dtype=not half, **close
                )
                if grad and tensors(expected):
                    pair = [
                        torch.autograd.grad([o.abs().sum() for o in tensors(out)], tensors(into),
                                            allow_unused=True)
                        for out, into in ((expected, (args, kwargs)), (found, (moved, options)))
                    ]  # fmt: skip
                    torch.testing.assert_close(
                        here(pair[1]), here(pair[0]), equal_nan=True, rtol=1e-3, atol=1e-3
                    )
                agree += 1
            except Exception as error:
                wrong[op.name] = f"{type(error).__name__}: {str(error)[:200]}"
    return agree, wrong


@pytest.mark.parametrize(
    ("dtype", "grad", "share"),
    [
        (torch.float32, True, 0.5),
        (torch.float16, False, 0.3),
        (torch.int64, False, 0.6),
        (torch.complex64, False, 0.6),
    ],
)
def test_operators_agree_with_the_cpu(dtype: torch.dtype, grad: bool, share: float) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree, wrong = compare(dtype, grad, share, most=2)
    assert not wrong
    assert agree > 150
