"""The base of all sections of a configuration, and the text of their validation errors."""

from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

NameText = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys. The docstring under a field describes its key."""

    # Each process loads all sections and validates one whole configuration, so no section needs a validator of its own.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def default(cls) -> Self:
        """Return the section without keys, as the default of another section; it builds no validator."""
        return cls.model_construct()  # type: ignore[return-value]


MIB: Final = 1 << 20

_PROBLEMS: Final = {
    "missing": "is required",
    "model_type": "must be a section with keys",
    "model_attributes_type": "must be a section with keys",
    "dict_type": "must be a section with keys",
}


def problem_of(error: ErrorDetails) -> str:
    """Return the problem of a validation error in our form, such as `must be greater than 0 (got -1)`.

    The text of a validator of ours is returned as it is.
    """
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return _PROBLEMS["missing"]
    text = error["msg"].partition(", unable to parse")[0].removeprefix("Input ")
    text = text[:1].lower() + text[1:]
    problem = _PROBLEMS.get(error["type"], text.replace("should ", "must ", 1))
    return f"{problem} (got {error['input']!r})"
