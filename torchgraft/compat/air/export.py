"""`dynamo_export`, and the functions of TorchAir that prepare a model for the NPU."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.compat.air import dump
from torchgraft.compat.air.config import CompilerConfig
from torchgraft.compat.air.log import logger
from torchgraft.compat.notes import without_effect
from torchgraft.fx.capture import from_exported


def dynamo_export(
    *args: Any,
    model: torch.nn.Module,
    export_path: str = "export_file",
    export_name: str = "export",
    dynamic: bool = False,
    config: CompilerConfig | None = None,
    **kwargs: Any,
) -> None:
    """Write a model with its weights to `<export_path>/<export_name>.air`, and its graph as text.

    The file is an exported program of torch: `torch.export.load` and `graft.compile` take it. It is
    not a model for the NPU's offline compiler.
    """
    held = config if config is not None else CompilerConfig()
    without_effect("CompilerConfig.", held.idle())
    if os.path.islink(export_path):
        logger.error("dynamo_export: %s is a symbolic link, which is refused", export_path)
        return
    folder = Path(export_path)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = _dynamic(args, kwargs) if dynamic else None
    with torch.no_grad():
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    with open(folder / f"{export_name}.air", "wb") as file:
        torch.export.save(exported, file)
    gm = from_exported(exported, freeze=True).gm
    (folder / "dynamo.pbtxt").write_text(dump.render(gm, "pbtxt"), encoding="utf-8")


def _dynamic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    auto = torch.export.Dim.AUTO

    def dims(leaf: Any) -> Any:
        return [auto] * leaf.ndim if isinstance(leaf, torch.Tensor) else None

    return _torch.map_leaves(dims, (*args, *kwargs.values()))


def use_internal_format_weight(model: torch.nn.Module) -> torch.nn.Module:
    """Lay weights out as the NPU wants them; the code generator here packs them by itself."""
    why = "weights keep their layout; the code generator packs frozen ones by itself"
    without_effect("torchair.", {"use_internal_format_weight": why})
    return model


def patch_for_hcom() -> None:
    """Let collectives be traced. Dynamo does that by itself by now."""
    warnings.warn(
        "patch_for_hcom is not needed: torch.compile traces collectives of torch.distributed",
        UserWarning,
        stacklevel=2,
    )
