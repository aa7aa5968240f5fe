"""Errors cross a border between processes, and say what happened also where only their `repr` is shown."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from rolloutmq.schemas import errors
from rolloutmq.schemas.errors import RolloutMQError, WaitTimeoutError
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion

GIVEN: dict[str, Any] = {"str": "text", "int": 3, "float": 1.5, "bool": True, "ErrorCode": ErrorCode.CONFLICT}


def kinds(below: type[RolloutMQError] = RolloutMQError) -> Iterator[type[RolloutMQError]]:
    for kind in below.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
        yield from kinds(kind)


def given(kind: type[RolloutMQError]) -> list[Any]:
    found: list[Any] = []
    if kind.__init__ is Exception.__init__:
        return ["text"]
    for one in inspect.signature(kind).parameters.values():
        if one.default is inspect.Parameter.empty and one.kind is one.POSITIONAL_OR_KEYWORD:
            annotation: Any = one.annotation
            name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
            found.append(GIVEN.get(name, PolicyVersion() if name == "PolicyVersion" else ("a", "b")))
    return found


@pytest.mark.parametrize("kind", sorted(set(kinds()), key=str))
def test_an_error_is_the_same_in_another_process(kind: type[RolloutMQError]) -> None:
    try:
        error = kind(*given(kind))
    except TypeError:
        error = kind.__new__(kind)  # its arguments have kinds of their own
        error.problem = "text"  # type: ignore[attr-defined]
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind
        assert other.__dict__ == error.__dict__
        assert other.args == error.args


def test_text_and_repr_tell_what_happened() -> None:
    error = pickle.loads(pickle.dumps(WaitTimeoutError("send", 1.0, "the broker is gone")))
    assert str(error) == "send: not done within timeout_s of 1.0 s: the broker is gone"
    assert repr(error) == f"WaitTimeoutError({str(error)!r})"
