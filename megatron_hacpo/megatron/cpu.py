"""Megatron-core on machines without CUDA, and in two versions: the one place that changes Megatron itself.

Megatron-core names CUDA literally (`device="cuda"`, `torch.cuda.current_device()`, `tensor.type() ==
"torch.cuda.FloatTensor"`). On a machine without a GPU, `install` gives every `megatron.core` module a `torch`
whose CUDA is the CPU; everybody else keeps the real one, but for `Tensor.cuda` and `Tensor.type`, which exist
only once. With a GPU nothing is replaced.

The replaced names are private to Megatron, so only the versions that the tests ran are accepted on CPU.
"""

import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch

TESTED_VERSIONS = ("0.16.1", "0.19.2")

_CPU = torch.device("cpu")
_USED_MODULES = (
    "dist_checkpointing",
    "distributed",
    "models.gpt.gpt_layer_specs",
    "models.gpt.gpt_model",
    "optimizer",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel.random",
    "transformer.module",
    "transformer.moe.moe_utils",
    "transformer.moe.token_dispatcher",
)

_DEPRECATING_MODULES = (  # they log no other warnings
    "dist_checkpointing.strategies.common",
    "distributed.distributed_data_parallel",
    "models.gpt.gpt_model",
)


def install() -> None:
    """Import the megatron-core modules that the package uses and, without CUDA, point them at the CPU.

    Raises ValueError when the installed megatron-core is not one that was tested on CPU. Idempotent.
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        installed = version("megatron-core")
        if installed not in TESTED_VERSIONS:
            raise ValueError(
                f"megatron-core: {installed} was not tested without a GPU; "
                f"install one of {', '.join(TESTED_VERSIONS)} or run on a machine with CUDA"
            )
        # Nothing that a user of a CPU could act on: Apex and TransformerEngine are for GPUs.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
        _replace_triton_kernels()
    with _without_compile() if on_cpu else nullcontext():
        for name in _USED_MODULES:
            importlib.import_module(f"megatron.core.{name}")
    _make_versions_alike()
    if on_cpu:
        _patch_tensor()
        _patch_rng()
        _patch_dispatcher()
        proxy = _torch_on_cpu()
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core") and module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = proxy


def _replace_triton_kernels() -> None:
    """0.19 imports kernels written in Triton, which torch for CPUs lacks. Nothing here runs them."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    kernels = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(dict.fromkeys(kernels))


def _make_versions_alike() -> None:
    """Add the names that a version lacks, and silence what 0.19 deprecates: no user could act on it."""
    # Without TransformerEngine 0.16.1's router asks for a name that it has not imported.
    sys.modules["megatron.core.transformer.moe.moe_utils"].__dict__.setdefault("te_general_gemm", None)
    optimizer = sys.modules["megatron.core.optimizer.optimizer"].MegatronOptimizer
    if not hasattr(optimizer, "get_grads_for_grad_norm"):  # as 0.19 calls it
        optimizer.get_grads_for_grad_norm = optimizer.get_main_grads_for_grad_norm
    for name in _DEPRECATING_MODULES:
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


@contextmanager
def _without_compile() -> Iterator[None]:
    """Megatron's @jit_fuser is torch.compile: it needs a compiler at run time and seconds to import."""
    real = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else lambda fn: fn  # type: ignore
    try:
        yield
    finally:
        torch.compile = real


class _Overlay(types.ModuleType):
    """A module that answers with `overrides` first and with `real` for every other name."""

    def __init__(self, real: types.ModuleType, overrides: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(overrides)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _Stream:
    """The only stream there is, and its only event: everything before has happened."""

    def wait_stream(self, other: "_Stream") -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> "_Stream":
        return self


def _torch_on_cpu() -> types.ModuleType:
    """`torch` in which the device "cuda" is the CPU. Work on a CPU is in order, so waiting is a no-op."""
    cuda = _Overlay(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "synchronize": lambda *args: None,
            "empty_cache": lambda: None,
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *args: torch.get_rng_state(),
            "set_rng_state": lambda state, *args: torch.set_rng_state(state),
            "Stream": _Stream,
            "current_stream": lambda *args: _Stream(),
            "stream": lambda *args: nullcontext(),
        },
    )
    factories = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros")
    return _Overlay(torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in factories}})


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _patch_tensor() -> None:
    """`.cuda()` stays on the CPU, and Megatron's string comparisons of tensor types hold."""
    real_type = torch.Tensor.type

    def type_as_megatron_expects(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    if torch.Tensor.type.__name__ != type_as_megatron_expects.__name__:
        torch.Tensor.type = type_as_megatron_expects  # type: ignore[method-assign, assignment]
        torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _patch_rng() -> None:
    """Megatron's RNG tracker reads and writes CUDA generator states through two private functions."""
    random = sys.modules["megatron.core.tensor_parallel.random"]
    random.__dict__["_get_cuda_rng_state"] = lambda *args, **kwargs: torch.get_rng_state()
    random.__dict__["_set_cuda_rng_state"] = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _patch_dispatcher() -> None:
    """The token dispatcher moves its split sizes from CUDA to a list; on the CPU it leaves them a tensor."""

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.__dict__["maybe_move_tensor_to_cpu"] = moved
