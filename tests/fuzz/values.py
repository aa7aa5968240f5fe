"""Mutations of decoded values: absurd numbers, other texts, lists that are too long, too short, or in another order."""

import random
from collections.abc import Sequence
from typing import Any, Final

INTEGERS: Final = (
    0,
    1,
    -1,
    255,
    (1 << 31) - 1,
    1 << 32,
    (1 << 53) + 1,
    (1 << 62),
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
)
FLOATS: Final = (0.0, -0.0, -1.0, 1e-320, 1e18, 1.7e308, -1.7e308, float("nan"), float("inf"), float("-inf"))
TEXTS: Final = (
    "",
    "x",
    "x" * 300,
    "a\x00b",
    "é\u202e\U0001f600",
    "../../etc/passwd",
    "\x1b[2J",
    *("queued", "leased", "trained", "committed", "filtered", "expired", "dead", "discarded"),
    "damaged",
    "default",
    "-1",
    "1e400",
)
OTHERS: Final[tuple[Any, ...]] = (None, True, 0, -1, 1.5, "x", b"x", [], {}, [[]], {"a": 1})
REPEATS_LIMIT: Final = 300


def mutated(value: Any, rng: random.Random, others: Sequence[Any] = ()) -> Any:
    """Return a value with one change somewhere in it; it mostly keeps the types.

    Args:
        value: Of lists, maps, texts, bytes and numbers.
        rng: The source.
        others: Values of the same kind, some of which may take the place of a part.
    """
    places = _places(value)
    *path, last = rng.choice(places) if places else [None]
    if last is None or rng.random() < 0.02:
        return changed(value, rng, others)
    copy = _copied(value)
    inner = copy
    for step in path:
        inner = inner[step]
    if isinstance(inner, list) and rng.random() < 0.25:
        _rearrange(inner, last, rng)
    elif isinstance(inner, dict) and rng.random() < 0.15:
        del inner[last]
    else:
        inner[last] = changed(inner[last], rng, others)
    return copy


def replaced(value: Any, rng: random.Random, new: Any) -> Any:
    """Return a value in which something else takes the place of one part."""
    places = _places(value)
    if not places:
        return new
    *path, last = rng.choice(places)
    copy = inner = _copied(value)
    for step in path:
        inner = inner[step]
    inner[last] = new
    return copy


def changed(value: Any, rng: random.Random, others: Sequence[Any] = ()) -> Any:
    """Return another value, mostly of the same type."""
    if rng.random() < 0.1:
        return rng.choice((*OTHERS, *others))
    match value:
        case bool():
            return not value
        case int():
            near = value + rng.choice((-2, -1, 1, 2, 100))
            return rng.choice((near, -value, value * 2, *rng.sample(INTEGERS, 4)))
        case float():
            return rng.choice((*FLOATS, -value, value * 1e9))
        case str():
            return rng.choice((*TEXTS, value + "x", value[:-1], value * 2))
        case bytes():
            return rng.choice((b"", b"\xff" * 16, value[:-1], value + b"\x00", bytes(len(value))))
        case list():
            return rng.choice(([], value * 2, value[::-1], value[1:], [value], value * REPEATS_LIMIT))
        case dict():
            return rng.choice(({}, {**value, "x": 1}, list(value)))
        case _:
            return rng.choice((*OTHERS, *others))


def _places(value: Any) -> list[list[Any]]:
    """Return the paths of all parts."""
    found: list[list[Any]] = []
    rest: list[tuple[list[Any], Any]] = [([], value)]
    while rest:
        path, inner = rest.pop()
        keys = range(len(inner)) if isinstance(inner, list) else inner if isinstance(inner, dict) else ()
        for key in keys:
            found.append([*path, key])
            rest.append(([*path, key], inner[key]))
    return found


def _copied(value: Any) -> Any:
    """Return a copy of which every list and map may be changed."""
    if isinstance(value, list):
        return [_copied(one) for one in value]
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return value


def _rearrange(inner: list[Any], at: int, rng: random.Random) -> None:
    """Remove, repeat or move an element."""
    match rng.randrange(4):
        case 0:
            del inner[at]
        case 1:
            inner.insert(rng.randrange(len(inner) + 1), _copied(inner[at]))
        case 2:
            inner.insert(rng.randrange(len(inner)), inner.pop(at))
        case _:
            inner[at:] = []
