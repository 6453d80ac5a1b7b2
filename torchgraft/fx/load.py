"""Programs from files: TorchScript (`.pt`) and exported programs (`.pt2`), never a pickle."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from typing import Any

import torch

from torchgraft.errors import UnsupportedFile, first_line


def load(path: str | os.PathLike[str]) -> Any:
    """The ScriptModule or ExportedProgram in a file, told apart by what the file holds."""
    if not os.path.exists(path):
        raise UnsupportedFile(path, "there is no such file.", "Check the path.")
    try:
        with zipfile.ZipFile(path) as archive:
            inner = {name.partition("/")[2]: name for name in archive.namelist()}
            if "manifest.json" in archive.namelist():
                raise UnsupportedFile(path, "it is a compiled program already.", _COMPILED)
            if "archive_format" in inner:
                _refuse_pickles(path, archive, inner)
                return _read(path, torch.export.load)
    except (zipfile.BadZipFile, OSError) as error:
        raise UnsupportedFile(path, f"not a zip archive ({error}).", _FORMS) from None
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return _read(path, torch.jit.load)  # its unpickler makes tensors and numbers only
    if "data.pkl" in inner:
        raise UnsupportedFile(
            path,
            "it was written by torch.save; loading it would run what its pickle says.",
            "Load it yourself if you trust it, and pass the module. " + _FORMS,
        )
    raise UnsupportedFile(path, "it is neither TorchScript nor an exported program.", _FORMS)


def _refuse_pickles(path: Any, archive: zipfile.ZipFile, inner: dict[str, str]) -> None:
    """torch.export.load unpickles some members; let only those through that cannot run code."""
    for name, member in inner.items():
        if name.startswith("data/") and name.endswith("_config.json"):
            entries = json.loads(archive.read(member)).get("config", {})
            for key, entry in entries.items():
                if entry.get("use_pickle"):
                    raise UnsupportedFile(
                        path, f"{key!r} in it is pickled, which could run code.", _TRUSTED
                    )
        elif name.startswith("data/sample_inputs/"):
            try:
                torch.load(io.BytesIO(archive.read(member)), weights_only=True)
            except Exception:
                raise UnsupportedFile(
                    path, "its sample inputs are pickled objects, which could run code.", _TRUSTED
                ) from None


_COMPILED = (
    "graft.load takes it; torchgraft inspect FILE shows what is in it, and "
    "torchgraft run-model MODEL --program FILE runs it."
)
_TRUSTED = "If you trust it, load it with torch.export.load and pass the ExportedProgram."
_FORMS = "Save a program with torch.export.save (.pt2) or torch.jit.save (.pt)."


def _read(path: Any, read: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read(os.fspath(path))
        except Exception as error:
            raise UnsupportedFile(path, first_line(error), _FORMS) from error
