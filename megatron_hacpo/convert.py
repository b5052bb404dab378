"""The commands that turn Hugging Face folders into Megatron checkpoints and back."""

import ctypes
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Source = Annotated[Path, typer.Argument(metavar="SOURCE")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="A folder that is not there yet.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; by default what the weights are now.")]
_DTYPES = ("float32", "bfloat16")
Verify = Annotated[bool, typer.Option("--verify", help="Read everything again and compare every tensor.")]


def to_megatron(
    source: Source,
    target: Target,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size to pad the vocabulary for.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size to check the layers against.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size to check the experts against.")] = 1,
    dtype: Dtype = None,
    verify: Verify = False,
    verify_logits: Annotated[
        bool, typer.Option("--verify-logits", help="Also compare log-probs; both models in memory.")
    ] = False,
) -> None:
    """Hugging Face folder SOURCE to Megatron checkpoint TARGET, which every layout loads."""
    _check(source, dtype)
    keep_freed_memory()
    from megatron_hacpo.megatron.convert import hf_to_megatron, open_folder
    from megatron_hacpo.megatron.runtime import Layout
    from megatron_hacpo.megatron.verify import verify_log_probs, verify_tensors

    layout = Layout(tensor=tp, pipeline=pp, expert=ep)
    with _disk_errors(target):
        size = open_folder(source).bytes
        with _bar("converting", size) as progress:
            hf_to_megatron(source, target, layout=layout, dtype=_torch(dtype), progress=progress)
    if verify:
        with _bar("verifying", size) as progress:
            count = verify_tensors(source, target, progress)
        print(f"{count} tensors are equal")
    if verify_logits:
        print(f"log-probs differ by {verify_log_probs(source, target):.1e} in the mean")
    print(f"{target} is written")


def to_hf(
    source: Source,
    target: Target,
    like: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where config.json and the tokenizer are; by default in SOURCE."),
    ] = None,
    dtype: Dtype = None,
    shard_gb: Annotated[float, typer.Option(help="Largest weight file, in GB.")] = 5.0,
    verify: Verify = False,
) -> None:
    """Megatron checkpoint SOURCE to Hugging Face folder TARGET."""
    _check(source, dtype)
    if not 0 < shard_gb < math.inf:
        raise ValueError(f"--shard-gb: {shard_gb}: must be a number above 0; choose another")
    if like is not None and not like.is_dir():
        raise ValueError(f"--like: {like}: no such folder; give the path of the model's Hugging Face folder")
    keep_freed_memory()
    from megatron_hacpo.megatron.convert import megatron_to_hf
    from megatron_hacpo.megatron.verify import verify_tensors

    size = sum(file.stat().st_size for file in source.glob("*.distcp"))
    with _disk_errors(target), _bar("converting", size) as progress:
        megatron_to_hf(
            source,
            target,
            like=like,
            dtype=_torch(dtype),
            shard_bytes=int(shard_gb * 10**9),
            progress=progress,
        )
    if verify:
        with _bar("verifying", size) as progress:
            count = verify_tensors(target, source, progress)
        print(f"{count} tensors are equal")
    print(f"{target} is written")


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let this process use the memory of freed tensors again; mallopt(3) describes the settings.

    By default glibc gives large blocks back to the kernel at once, and a conversion spends up to half of its
    time on empty pages for the next tensor. Another C library goes its own way.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _check(source: Path, dtype: str | None) -> None:
    if not source.is_dir():
        raise ValueError(f"SOURCE: {source}: no such folder; give the path of a model folder")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"--dtype: {dtype}: not one of {', '.join(_DTYPES)}; choose one")


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """What the system refuses, such as a full disk, as a mistake in one line."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or target
        raise ValueError(f"{place}: {error.strerror or error}; mend that, nothing was written") from error


def _torch(dtype: str | None) -> Any:
    import torch

    return None if dtype is None else getattr(torch, dtype)


@contextmanager
def _bar(what: str, size: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=size)
        yield lambda done: progress.advance(task, done)
