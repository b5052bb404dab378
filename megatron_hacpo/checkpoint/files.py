"""Files that are complete or absent, and what is in them."""

import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

_PIECE_BYTES = 2**20

_TRY_SECONDS = 10.0
"""Far longer than others keep removing a folder; where none can be made, as in a deleted one, it ends."""


class FileEntry(msgspec.Struct, frozen=True):
    """What a manifest says of a file. size: bytes. sha256: in hexadecimal."""

    size: int
    sha256: str


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either complete or absent, also after a crash; makes its folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _open_in_new_folder(beside) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Put a file on the disk that somebody else has written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe(path: Path) -> FileEntry:
    """Size and hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        return FileEntry(file.tell(), digest.hexdigest())


def find_damage(folder: Path, files: dict[str, FileEntry], *, hashes: bool = True) -> str | None:
    """What is wrong with the first file that is not as its entry says; None if all are.

    hashes: False compares sizes alone, without reading.
    """
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry.size:
            return f"{path} has {path.stat().st_size:,} bytes, not {entry.size:,}"
    if hashes:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing frees the interpreter
            found = pool.map(lambda name: describe(folder / name), files)
            for name, now in zip(files, found, strict=True):
                if now != files[name]:
                    return f"{folder / name} has changed: its SHA-256 is not the one that was saved"
    return None


def remove(paths: Iterable[Path]) -> None:
    """Delete files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def _open_in_new_folder(path: Path) -> BinaryIO:
    """Open for writing, making the folder. Agents that share nothing do not wait for each other, so another
    one may remove the folder, or the one that it is made in, while it is still empty.
    """
    deadline = time.monotonic() + _TRY_SECONDS
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb")
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
