"""From a configured name to a verifier."""

import importlib

from megatron_hacpo.reward.base import Verifier
from megatron_hacpo.reward.exact import EXACT

_BUILT_IN = {EXACT.name: EXACT}


def get_verifier(name: str) -> Verifier:
    """A built-in verifier ("exact") or a custom one, "package.module:attribute".

    The attribute is a verification function (see `reward.base`) or a `Verifier`, where `needs_stop` matters.
    Raises ValueError for an unknown name and for a module or attribute that does not exist.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
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
