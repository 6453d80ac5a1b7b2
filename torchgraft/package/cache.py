"""The compile cache: a folder of packages, each named by the hash of everything it depends on."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchgraft.compile import Compiled, captured_for
from torchgraft.config import Config
from torchgraft.errors import BadPackage, BadValue, GraftError, NotSavable, first_line
from torchgraft.fx.capture import Capture
from torchgraft.package.archive import KEY, TEMPORARY, Archive
from torchgraft.package.fingerprint import Unknowable
from torchgraft.package.key import Key, differences, digest, key_of
from torchgraft.package.load import Loaded, checked, opened
from torchgraft.package.ranks import turn_of
from torchgraft.package.save import ahead, constants_of, weights_of

log = logging.getLogger("torchgraft")

_COMPARED = 64  # the most recent entries that a miss is compared with
_ABANDONED = 3600.0  # seconds after which a file that was never finished is removed


class Cache:
    """Compiled programs in a folder. Any number of processes may use it at the same time."""

    def __init__(self, folder: str | os.PathLike[str], most_bytes: int) -> None:
        self.folder, self.most_bytes = Path(folder), most_bytes

    def get(
        self, name: str, front_end: str, captures: Sequence[Capture], config: Config
    ) -> Compiled:
        """The program from the cache, else compiled and kept there."""
        try:
            key = key_of(name, front_end, captures, config)
        except Unknowable as error:
            return _uncached(name, front_end, captures, config, f"not cached: {error}")
        part = turn_of(key, captures, config)
        if part is None:
            return self._own(key, name, front_end, captures, config)
        if part.first:
            made = ""
            try:
                compiled = self._own(key, name, front_end, captures, config)
                made = self._path(key).name if isinstance(compiled, Loaded) else ""
                return compiled
            finally:
                part.done(made)
        said = part.result()
        path = self.folder / Path(said).name if said else None
        why = "the first rank made no package that this one can see"
        if path is not None and path.exists():
            try:
                return self._taken(path, captures)
            except (GraftError, OSError) as error:
                why = first_line(error)
        compiled = self._own(key, name, front_end, captures, config)
        compiled.report.notes.append(f"compiled by this rank itself: {why}")
        return compiled

    def _path(self, key: Key) -> Path:
        return self.folder / f"{digest(key)}.graft"

    def _taken(self, path: Path, captures: Sequence[Capture]) -> Loaded:
        """What another rank compiled, with the weights of this one."""
        loaded = opened(path)
        loaded.use_states({n: t for c in captures for n, t in c.states.items()})
        loaded.use_weights(weights_of(captures))
        loaded.report.notes.append("another rank compiled it: nothing was compiled here")
        return loaded

    def _own(
        self, key: Key, name: str, front_end: str, captures: Sequence[Capture], config: Config
    ) -> Compiled:
        """The program from the cache, else compiled here and kept there."""
        path, why = self._path(key), self.explain(key)
        if path.exists():
            try:
                return self._hit(path, key, captures)
            except (GraftError, OSError) as error:  # a damaged entry is as good as none
                why = f"the entry was no good: {first_line(error)}"
                log.warning("torchgraft: %s", why)
        try:
            _, package = ahead(name, front_end, captures, config)
        except NotSavable as error:
            return _uncached(name, front_end, captures, config, f"not cached: {error.why}")
        self.folder.mkdir(parents=True, exist_ok=True)
        package.add(KEY, key)
        package.write(path)
        loaded = self._open(path, key, captures)
        loaded.report.notes.append(f"cache miss: {why}")
        self._shrink(path)
        return loaded

    def explain(self, key: Key) -> str:
        """Why a program with this key is not in the cache: what differs from the nearest one."""
        if self._path(key).exists():
            return "it is in the cache"
        nearest: list[str] | None = None
        for entry in self._entries()[-_COMPARED:]:
            with contextlib.suppress(BadPackage, OSError):
                old = Archive(entry).json(KEY)
                if isinstance(old, Mapping):
                    found = differences(key, old)
                    if nearest is None or len(found) < len(nearest):
                        nearest = found
        if nearest is None:
            return "the cache is empty"
        return "nearest entry differs in " + "\n  ".join(nearest)

    def _hit(self, path: Path, key: Key, captures: Sequence[Capture]) -> Loaded:
        loaded = self._open(path, key, captures)
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now
        loaded.report.notes.append("cache hit: nothing was compiled")
        return loaded

    def _open(self, path: Path, key: Key, captures: Sequence[Capture]) -> Loaded:
        """The program of an entry, with the weights that were captured. They are what the file has,
        because the key has their hashes, so those in the file are not read."""
        entry = Archive(path)
        entry.check(KEY)
        if entry.json(KEY) != key:
            raise BadPackage("it is the entry of another program", path)
        states = {n: t for c in captures for n, t in c.states.items()}
        loaded = checked(entry, states=states)
        loaded.start(borrowed={**weights_of(captures), **constants_of(captures)})
        return loaded

    def _entries(self) -> list[Path]:
        """Every entry, the least recently used first."""
        found = []
        for path in self.folder.glob("*.graft"):
            with contextlib.suppress(OSError):  # another process may remove it
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def _shrink(self, keep: Path) -> None:
        """Remove the least recently used entries until the rest fits; the one just made stays."""
        entries = self._entries()
        sizes: dict[Path, int] = {}
        for path in entries:
            with contextlib.suppress(OSError):
                sizes[path] = path.stat().st_size
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self.most_bytes:
                break
            if path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size
        for path in self.folder.glob(f"{TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()


def _uncached(
    name: str, front_end: str, captures: Sequence[Capture], config: Config, why: str
) -> Compiled:
    compiled = Compiled(name, front_end, captures, config)
    compiled.report.notes.append(why)
    return compiled


def explain_miss(
    model: Any,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: Config | None = None,
    **fields: Any,
) -> str:
    """Why `graft.compile` with the same arguments would not find its program in `cache_dir`.

    The model is captured, but nothing is compiled.
    """
    settings = Config.given(config).replace(**fields)
    if settings.cache_dir is None:
        raise BadValue("cache_dir", None, "the folder of the cache")
    taken = captured_for(model, inputs, kwargs, settings)
    if isinstance(taken, Compiled):
        return "a program with branches in Python is not cached"
    try:
        key = key_of(*taken, settings)
    except Unknowable as error:
        return f"it cannot be cached: {error}"
    return Cache(settings.cache_dir, settings.cache_bytes).explain(key)
