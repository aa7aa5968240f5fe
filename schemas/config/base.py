"""The base of all sections of a configuration, the types of their values, and the text of their validation errors.

A TOML file has types, so a text there is neither a number nor true or false, and true is no number. An environment
variable and `--set` have only text: what is not TOML in them stays a `Text`, which is read as pydantic does.
"""

import json
from typing import Annotated, Any, Final, LiteralString, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

INTEGER_LIMIT: Final = 1 << 62
"""Largest integer of a key: that of a message, `schemas.wire.envelope.Count`."""
SHOWN_CHARS: Final = 200
"""Most characters of a value in an error."""
PROCESSES_LIMIT: Final = 10_000
"""Most processes of one kind: as many as the broker has room for in its table of workers."""

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
NameText = Annotated[str, Field(pattern=NAME_PATTERN)]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys. The docstring under a field describes its key."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        found = handler(source)
        _require_types(handler.resolve_ref_schema(found))
        return found

    # Each process loads all sections and validates one whole configuration, so no section needs a validator of its own.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def default(cls) -> Self:
        """Return the section without keys, as the default of another section; it builds no validator."""
        return cls.model_construct()  # type: ignore[return-value]


class Text(str):
    """The text of a value whose source has no types: an environment variable or `--set`."""

    __slots__ = ()


_REFUSED: Final[dict[str, tuple[frozenset[type], LiteralString, LiteralString]]] = {
    "int": (frozenset({bool, str}), "int_type", "Input should be a valid integer"),
    "float": (frozenset({bool, str}), "float_type", "Input should be a valid number"),
    "bool": (frozenset({str}), "bool_type", "Input should be a valid boolean"),
}
"""Types that pydantic would convert, and its own error for others, by the type of a schema."""


class _TypeCheck:
    """Validator that refuses the types which pydantic would convert to a number or bool."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, value: Any) -> Any:
        refused, error, text = _REFUSED[self._kind]
        if type(value) in refused:  # exactly: a `Text` is converted
            raise PydanticCustomError(error, text)
        return value


def _require_types(section: Any) -> None:
    """Let the numbers and bools of a section refuse values of other types, and its integers those above the limit.

    Args:
        section: Schema of a section, changed in place. The sections below it have theirs. Pydantic keeps the schema and
            passes it again for each type that has the section, so what is checked already stays as it is.
    """
    while section["type"] != "model-fields":  # validators of the section lie around its fields
        section = section["schema"]
    for field in section["fields"].values():
        _require_type(field, "schema")


def _require_type(holder: Any, key: Any) -> None:
    schema = holder[key]
    match schema:
        case {"type": "int" | "float" | "bool"}:
            holder[key] = _checked(schema)
        case {"type": "function-before", "function": {"function": _TypeCheck()}}:
            pass
        case {"type": "default" | "nullable" | "function-after" | "function-before"}:
            _require_type(schema, "schema")
        case {"type": "list" | "set" | "frozenset", "items_schema": _}:
            _require_type(schema, "items_schema")
        case {"type": "dict", "values_schema": _}:
            _require_type(schema, "values_schema")
        case {"type": "tuple", "items_schema": members} | {"type": "union", "choices": members}:
            for at in range(len(members)):
                _require_type(members, at)


def _checked(schema: Any) -> CoreSchema:
    kind = schema["type"]
    if kind == "int" and not {"lt", "le"} & schema.keys():
        schema["le"] = INTEGER_LIMIT
    return core_schema.no_info_before_validator_function(_TypeCheck(kind), schema)


MIB: Final = 1 << 20

_PROBLEMS: Final = {
    "missing": "is required",
    "model_type": "must be a section with keys",
    "model_attributes_type": "must be a section with keys",
    "dict_type": "must be a section with keys",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
}


def location_of(error: ErrorDetails) -> list[str]:
    """Return the keys that lead to the value of a validation error, or to the name that is wrong."""
    parts = [str(part) for part in error["loc"]]
    return [*parts[:-2], parts[-2] or '""'] if parts[-1:] == ["[key]"] else parts


def problem_of(error: ErrorDetails) -> str:
    """Return the problem of a validation error in our form, such as `must be greater than 0 (got -1)`.

    The text of a validator of ours is returned as it is.
    """
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return _PROBLEMS["missing"]
    if error.get("ctx", {}).get("pattern") == NAME_PATTERN:
        rule = "must be 1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or a digit"
        return f"{rule} (got {_shown(error['input'])})"
    text = error["msg"].partition(", unable to parse")[0].removeprefix("Input ")
    text = text[:1].lower() + text[1:]
    if error["type"] == "json_invalid":
        return text.replace("JSON: ", "JSON, ", 1)
    problem = _PROBLEMS.get(error["type"], text.replace("should ", "must ", 1))
    if problem == _PROBLEMS["list_type"] and isinstance(error["input"], str) and error["input"]:
        problem += f", such as [{json.dumps(error['input'], ensure_ascii=False)}]"
    return f"{problem} (got {_shown(error['input'])})"


def _shown(given: object) -> str:
    """Return a value as an error shows it: whole only if it is short."""
    text = repr(given)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
