"""Error reference: every public error, grouped by what the caller can do about it."""

import inspect
from typing import Final

from rolloutmq.schemas import errors
from rolloutmq.schemas.errors import (
    GivenUpError,
    ResourceError,
    RetryableError,
    RolloutMQError,
    UsageError,
    WireError,
)

HEAD: Final = """\
# Errors

Every error of the SDK is a `RolloutMQError` and can be imported from `rolloutmq`. Its text has the form
`key: problem (got X); remedy`, and its fields hold the same values. Catch a group of errors by its base class.

`make reference` writes this page from the classes in `schemas/errors.py`."""
GROUPS: Final[dict[type[RolloutMQError], str]] = {
    RetryableError: "The call is correct. Retry it, with a pause.",
    GivenUpError: "The client cannot succeed any more. Stop, or open a new client.",
    UsageError: "Data, code or configuration is wrong. Change it; a retry cannot help.",
    WireError: "A peer broke the protocol. Check the versions of both sides.",
    ResourceError: "This machine lacks something. Free it, install it, or choose another one.",
}
"""Base class -> what to do."""


def page() -> str:
    """Return the page as Markdown."""
    return "\n\n".join([HEAD, *(_group(base, advice) for base, advice in GROUPS.items())]) + "\n"


def public_errors() -> list[type[RolloutMQError]]:
    """Return every error class of `schemas.errors`, in the order of the file."""
    found = [thing for thing in vars(errors).values() if inspect.isclass(thing)]
    return [
        thing for thing in found if issubclass(thing, RolloutMQError) and thing.__module__ == errors.__name__
    ]


def _group(base: type[RolloutMQError], advice: str) -> str:
    members = [error for error in public_errors() if issubclass(error, base) and error is not base]
    rows = [f"| `{error.__name__}` | {_summary(error)} |" for error in members]
    return "\n\n".join(
        [f"## `{base.__name__}`", advice, "\n".join(["| error | raised if |", "|---|---|", *rows])]
    )


def _summary(error: type[RolloutMQError]) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(error) or "").split("\n\n")[0].split())
