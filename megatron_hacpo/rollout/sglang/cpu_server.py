"""An SGLang server on a machine without CUDA: `PYTHON -P cpu_server.py --model-path DIR --device cpu ...`.

PYTHON is the interpreter of SGLang's own environment (tools/sglang_cpu_requirements.txt), so nothing of this
package is imported here. The arguments are those of `python -m sglang.launch_server`.

SGLang has a CPU engine, but its modules name GPU packages when they are imported: triton, whose kernels they
define with decorators, and sgl_kernel. Empty modules stand in for both, and the CPU engine calls nothing of
them. SGLang starts its processes by importing this file again, which puts the modules in place there too.
With a GPU, start SGLang itself instead.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_ABSENT_PACKAGES = ("triton", "sgl_kernel")


class _AbsentModule(ModuleType):
    """Has every name: a capitalised one is an empty class, any other a module that is also a decorator."""

    __version__ = "3.0.0"  # torch reads triton's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks up
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """`@triton.jit` and `@triton.jit(...)` alike leave the function as it is."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


class _AbsentFinder(MetaPathFinder, Loader):
    """Finds `_ABSENT_PACKAGES` and whatever is imported from inside them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] in _ABSENT_PACKAGES:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _define_torchvision_operators() -> None:
    """torchvision is imported too, and expects two operators that its wheel has in a CUDA library."""
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile looks into triton and needs a C++ compiler
sys.meta_path.insert(0, _AbsentFinder())
_define_torchvision_operators()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
