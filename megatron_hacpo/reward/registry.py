"""From a configured name to a verifier."""

import importlib
import importlib.util
import inspect
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from megatron_hacpo.reward.base import Verifier

Spec = str | dict[str, float]
"""A verifier's name, or the weight of each of several."""

_BUILT_IN = {
    "exact": "text:EXACT",
    "match": "text:MATCH",
    "choice": "choice:CHOICE",
    "boxed": "boxed:BOXED",
    "math": "math:MATH",
    "math_number": "math:MATH_NUMBER",
    "reasoning_gym": "gym:REASONING_GYM",
}
"""Module of this package and attribute. Modules are loaded when asked for: some need what is optional."""

_NEEDS = {"math": "math_verify", "math_number": "math_verify", "reasoning_gym": "reasoning_gym"}
"""Packages of the extra `rewards`."""


def get_verifier(spec: str | Mapping[str, float]) -> Verifier:
    """A built-in verifier by name, one of your own as "package.module:attribute", or several with weights.

    The attribute is a verification function (see `reward.base`) or a `Verifier`, where `needs_stop` matters.
    Several verifiers, {name: weight}, give the weighted sum of their rewards; if one of them gives none, or
    fails, so does the sum.
    Raises ValueError for an unknown name, for a module, attribute or package that does not exist, and for a
    weight that is none.
    """
    if isinstance(spec, str):
        return _single(spec)
    if not spec:
        raise ValueError("reward.verifier: {}: names no verifier; write NAME or {NAME: WEIGHT, ...}")
    for name, weight in spec.items():
        if not math.isfinite(weight) or weight == 0.0:
            raise ValueError(f"reward.verifier.{name}: {weight}: not a weight; use a number other than 0")
    parts = [(weight, _single(name)) for name, weight in spec.items()]
    return Verifier(
        name=" + ".join(f"{weight:g} {part.name}" for weight, part in parts),
        check=_Sum(parts),
        needs_stop=any(part.needs_stop for _, part in parts),
        warm_up=tuple(pair for _, part in parts for pair in part.warm_up),
        answer=next((part.answer for _, part in parts if part.answer is not None), None),
    )


class _Sum:
    """The weighted sum of several verifiers; waits for those that are coroutines."""

    def __init__(self, parts: list[tuple[float, Verifier]]) -> None:
        self._parts = parts

    async def __call__(self, text: str, answer: str) -> Any:
        total = 0.0
        for weight, part in self._parts:
            reward = part.check(text, answer)
            if inspect.isawaitable(reward):
                reward = await reward
            if not isinstance(reward, SupportsFloat):
                return reward  # None, or what is no number at all
            total += weight * float(reward)
        return total


def _single(name: str) -> Verifier:
    if name in _BUILT_IN:
        package = _NEEDS.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"reward.verifier: {name}: needs the package {package}; install megatron-hacpo[rewards]"
            )
        module_name, attribute = _BUILT_IN[name].split(":")
        return getattr(importlib.import_module(f"megatron_hacpo.reward.{module_name}"), attribute)
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(
            f"reward.verifier: {name!r} is unknown; use one of {sorted(_BUILT_IN)} or 'module:function'"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ValueError(f"reward.verifier: no module {module_name!r}; put it on PYTHONPATH") from error
        raise ValueError(f"reward.verifier: importing {module_name} failed ({error}); install it") from error
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ValueError(f"reward.verifier: importing {module_name} failed ({error!r}); fix it") from error
    check = getattr(module, attribute, None)
    if isinstance(check, Verifier):
        return check
    if not callable(check):
        raise ValueError(f"reward.verifier: module {module_name!r} has no function {attribute!r}")
    return Verifier(name, check)
