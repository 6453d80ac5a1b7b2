"""The zip: stored members, each hashed in the manifest; everything is checked before it is used."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import mmap
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from typing import Any

from torchgraft.errors import BadPackage, first_line
from torchgraft.package.codec import field, index

MANIFEST, WEIGHTS, KEY = "manifest.json", "weights.safetensors", "key.json"
FORMAT, VERSION = "torchgraft", 2
MOST_MEMBERS = 4096
MOST_JSON = 256 << 20
"""The largest member that is read as JSON, in bytes."""
ALIGNMENT = 64
TEMPORARY = ".graft-"
"""How the name of a file begins that is being written."""

_NAME = re.compile(
    r"(?!\.\.?(/|$))[A-Za-z0-9_.-]{1,128}(/(?!\.\.?(/|$))[A-Za-z0-9_.-]{1,128}){0,3}"
)
_PAD = 0xD935  # the id that zipalign gives such an extra field
_EPOCH = (1980, 1, 1, 0, 0, 0)
_LOCAL = struct.Struct("<4s5H3I2H")
_END = 22  # bytes of the last record, with no comment behind it

Data = bytes | memoryview


def write(path: str | os.PathLike[str], head: Mapping[str, Any], members: Mapping[str, Any]) -> str:
    """Write a package; a member is bytes, or a list of parts. A reader sees all of it or nothing.

    Gives the hash of its manifest, which is that of its content.
    """
    parts = {name: data if isinstance(data, list) else [data] for name, data in members.items()}
    listed = {
        name: {"size": sum(map(len, data)), "sha256": _hash(data)} for name, data in parts.items()
    }
    manifest = json.dumps({**head, "members": listed}, indent=1).encode()
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name, data in {MANIFEST: [manifest], **parts}.items():
                _add(archive, file, name, data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return hashlib.sha256(manifest).hexdigest()


def _hash(parts: list[Data]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _add(archive: zipfile.ZipFile, file: Any, name: str, parts: list[Data]) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.external_attr = 0o644 << 16
    size = sum(map(len, parts))
    large = size > zipfile.ZIP64_LIMIT
    start = file.tell() + _LOCAL.size + len(name) + (20 if large else 0) + 4
    pad = -start % ALIGNMENT
    info.extra = struct.pack("<HH", _PAD, pad) + bytes(pad)
    info.file_size = size
    with archive.open(info, "w", force_zip64=large) as member:
        for part in parts:
            member.write(part)


def _mapped(path: str | os.PathLike[str]) -> memoryview:
    with open(path, "rb") as file:
        try:
            # Copy on write: a program may write to its buffers, the file stays as it is.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except ValueError:
            raise BadPackage("it is empty", path) from None


class _Memory(io.RawIOBase):
    """Memory as a file."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._content[self._at : self._at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class Archive:
    """A package that was opened: `members[name]` is a view of the mapped file.

    Names, sizes and places are checked here, hashes by `verify` and `check`; so looking at the
    manifest of a large package is cheap.
    """

    def __init__(self, source: str | os.PathLike[str] | memoryview) -> None:
        """`source` is a path, or the whole file in memory."""
        if isinstance(source, memoryview):
            self.path, self.content = None, source
        else:
            self.path, self.content = source, _mapped(source)
        self._checked: set[str] = set()
        try:
            self._open()
        except BadPackage as error:
            raise BadPackage(error.why, self.path) from None

    def _open(self) -> None:
        if bytes(self.content[-_END:][:4]) != b"PK\5\6":
            why = "it is not a zip archive, or is cut off, or something was put behind it"
            raise BadPackage(why)
        try:
            # Its entries only: where a member lies is worked out below.
            with zipfile.ZipFile(io.BufferedReader(_Memory(self.content))) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
            raise BadPackage(f"its directory is damaged ({first_line(error)})") from None
        except (struct.error, OverflowError, MemoryError) as error:
            raise BadPackage(f"its directory is damaged ({first_line(error)})") from None
        if not infos or infos[0].filename != MANIFEST:
            raise BadPackage("its first member is not manifest.json")
        if len(infos) > MOST_MEMBERS:
            raise BadPackage(f"it has {len(infos)} members, {MOST_MEMBERS} are allowed")
        self.members: dict[str, memoryview] = {}
        end = 0
        for info in sorted(infos, key=lambda one: one.header_offset):
            end = self._member(info, end)
        self.manifest = self._manifest()

    def _member(self, info: zipfile.ZipInfo, end: int) -> int:
        """Note where a member lies; it must begin behind the one before, which ends at `end`."""
        name = info.filename
        if not _NAME.fullmatch(name) or info.orig_filename != name:
            raise BadPackage(
                f"a member is named {info.orig_filename[:200]!r}, which is no such name"
            )
        if name in self.members:
            raise BadPackage(f"there are two members {name!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ~0x0808:
            raise BadPackage(f"{name!r} is compressed or encrypted; members must be stored")
        if info.compress_size != info.file_size:
            raise BadPackage(f"{name!r} has two sizes")
        at = info.header_offset
        if at < end or at + _LOCAL.size > len(self.content):
            raise BadPackage(f"{name!r} overlaps another member")
        name_length: int
        extra_length: int
        mark, *_, name_length, extra_length = _LOCAL.unpack_from(self.content, at)
        start = at + _LOCAL.size + name_length + extra_length
        written = bytes(self.content[at + _LOCAL.size : at + _LOCAL.size + name_length])
        if mark != b"PK\3\4" or written != name.encode():
            raise BadPackage(f"{name!r} is not where the directory says")
        if start + info.file_size > len(self.content):
            raise BadPackage(f"{name!r} is cut off")
        self.members[name] = self.content[start : start + info.file_size]
        return start + info.file_size

    def _manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = self.json(MANIFEST)
        if field(manifest, "format", str) != FORMAT:
            raise BadPackage("it is not torchgraft's")
        if (version := field(manifest, "version", int)) != VERSION:
            raise BadPackage(f"its format has version {version}, this torchgraft reads {VERSION}")
        listed = field(manifest, "members", dict)
        if listed.keys() | {MANIFEST} != self.members.keys():
            odd = sorted((listed.keys() | {MANIFEST}) ^ self.members.keys())
            raise BadPackage(f"the manifest and the members differ in {', '.join(odd)[:200]}")
        for name, entry in listed.items():
            field(entry, "sha256", str)
            if index(field(entry, "size", int), 2**63) != len(self.members[name]):
                raise BadPackage(
                    f"{name!r} has {len(self.members[name])} bytes, {entry['size']} were written"
                )
        return manifest

    def json(self, name: str) -> Any:
        """A member as JSON; the keys of an object are unique."""
        data = self.members.get(name, b"")
        if len(data) > MOST_JSON:
            raise BadPackage(f"{name!r} has {len(data)} bytes, {MOST_JSON} are allowed")
        try:
            return json.loads(bytes(data), object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadPackage(f"{name!r} is not JSON ({first_line(error)})") from None

    def verify(self, sha256: str | None = None, *, but: Collection[str] = ()) -> None:
        """Raise `BadPackage` unless every member is what the manifest says; with `sha256`, unless
        the whole file has that hash. Members in `but` are left to `check`."""
        if sha256 is not None:
            found = hashlib.sha256(self.content).hexdigest()
            if not hmac.compare_digest(found, sha256.lower()):
                raise BadPackage(f"its SHA-256 is {found}, not {sha256}", self.path)
        for name in self.manifest["members"]:
            if name not in but:
                self.check(name)

    def check(self, name: str) -> None:
        """Raise `BadPackage` unless a member is what the manifest says; it is hashed once."""
        listed = self.manifest["members"]
        if name in self._checked or name not in listed:
            return
        if hashlib.sha256(self.members[name]).hexdigest() != listed[name]["sha256"]:
            raise BadPackage(f"{name!r} was altered after it was written", self.path)
        self._checked.add(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
