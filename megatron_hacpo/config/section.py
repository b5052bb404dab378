"""What all sections of a configuration are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
"""A name that is also a folder: letters, digits, `_`, `-` and `.`, not starting with a dot or a dash."""

KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]
"""As `Name`, without dots, which separate the keys of an override."""

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**7)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Section(BaseModel):
    """Unknown keys, text for numbers and NaN are errors; nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
