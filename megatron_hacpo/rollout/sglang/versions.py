"""Which SGLang servers speak the protocol that is used here."""

LOWEST, ABOVE = (0, 5, 21), (0, 6, 0)
"""Versions from the first on and below the second: those with begin_weight_update and end_weight_update."""


def unsupported(version: str) -> str | None:
    """What is wrong with a version and how to put it right; None for a supported one."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if len(numbers) == 3 and LOWEST <= numbers < ABOVE:
        return None
    lowest, above = (".".join(map(str, bound)) for bound in (LOWEST, ABOVE))
    return f"has SGLang {version}; install one from {lowest} on and below {above} there"
