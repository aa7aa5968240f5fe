"""The page of all keys of a configuration, `docs/configuration.md`, made of the models that check them.

What a key means is said under its field and nowhere else. `make reference` writes the page.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from textwrap import fill
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel

from rolloutmq.launch.settings import is_section, kinds_of
from rolloutmq.schemas.config import RunConfig

HEAD: Final = """\
# Every key of a configuration

Said in a TOML file, by `ROLLOUTMQ_SECTION__KEY` in the environment, or by `--set section.key=value`; the last wins.
A key that is not here is refused. Units are in the names, defaults in brackets. `rolloutmq set` changes some of them
while a run lives.

This page is made of the models in `schemas/`, by `make reference`."""
NOT_SAID: Final = frozenset({"base_dir"})
"""Filled in by whoever reads the file."""
WIDTH: Final = 120
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20))

Kinds = Mapping[str, BaseModel]
"""The kinds that a section may be of, by `name`, each with its defaults; one without a name if there is no choice."""


def page() -> str:
    """Return the page as Markdown."""
    return "\n\n".join([HEAD, *_section("", {"": RunConfig.model_construct()})]) + "\n"


def _section(path: str, kinds: Kinds) -> Iterator[str]:
    """Yield the paragraphs of a section and of those below it."""
    keys: list[str] = []
    below: list[tuple[str, Kinds]] = []
    for name in dict.fromkeys(name for kind in kinds.values() for name in type(kind).model_fields):
        having = {label: kind for label, kind in kinds.items() if name in type(kind).model_fields}
        inner = _inner(name, having)
        if inner:
            below.append((f"{path}.{name}".lstrip(".") + _suffix(name, having), inner))
        elif name not in NOT_SAID:
            keys.append(_key(name, having))
    if path:
        yield from (f"## `[{path}]`", _about(path, kinds), "\n".join(keys))
    for inner_path, inner in below:
        yield from _section(inner_path, inner)


def _annotation(name: str, kinds: Kinds) -> Any:
    return type(next(iter(kinds.values()))).model_fields[name].annotation


def _inner(name: str, kinds: Kinds) -> Kinds:
    """Return the section that a key is, its usual kind first; nothing if it is a value."""
    annotation = _annotation(name, kinds)
    if choices := kinds_of(annotation):
        usual = type(getattr(next(iter(kinds.values())), name))
        ordered = sorted(choices.items(), key=lambda choice: choice[1] is not usual)
        return {label: kind.model_construct() for label, kind in ordered}
    if is_section(annotation):
        return {label: getattr(kind, name) for label, kind in kinds.items()}
    # One for each name, or one that may be left out.
    return next(({"": part.model_construct()} for part in get_args(annotation) if is_section(part)), {})


def _suffix(name: str, kinds: Kinds) -> str:
    return ".NAME" if get_origin(_annotation(name, kinds)) is dict else ""


def _about(path: str, kinds: Kinds) -> str:
    """Return what a section is for; its name is the title."""
    told = {_plain(type(kind).__doc__).removeprefix(f"`[{path}]`: "): label for label, kind in kinds.items()}
    if len(told) == 1:
        (text,) = told
        return fill(text[:1].upper() + text[1:], WIDTH)
    return "\n".join(_item(f"`name = {json.dumps(label)}`: {text}") for text, label in told.items())


def _key(name: str, kinds: Kinds) -> str:
    defaults = {label: _default(kind, name) for label, kind in kinds.items()}
    ((usual, _),) = Counter(defaults.values()).most_common(1)
    others = [f"{label}: {default}" for label, default in defaults.items() if default != usual]
    if name == "name":
        others = []  # the section begins with them
    text = next(filter(None, (_described(type(kind), name) for kind in kinds.values())), "")
    annotation = _annotation(name, kinds)
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    if choices and name != "name":
        text = f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}.".lstrip()
    return _item(f"`{name}` ({'; '.join([usual, *others])}){': ' if text else ''}{text}")


def _default(kind: BaseModel, name: str) -> str:
    if type(kind).model_fields[name].is_required():
        return "required"
    value = getattr(kind, name)
    if value is None:
        return "none"
    if isinstance(value, int) and name.endswith("_bytes"):
        unit = next(((word, size) for word, size in _UNITS if value and not value % size), None)
        return f"`{value}`, {value // unit[1]} {unit[0]}" if unit else f"`{value}`"
    return f"`{json.dumps(value, default=_json)}`"


def _json(value: Any) -> Any:
    return str(value) if isinstance(value, PurePath) else list(value)


def _described(kind: type[BaseModel], name: str) -> str:
    """Return the text under a field, or under the one that it takes the place of."""
    bases = (base for base in kind.__mro__ if issubclass(base, BaseModel) and name in base.model_fields)
    return next((_plain(text) for base in bases if (text := base.model_fields[name].description)), "")


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def _item(text: str) -> str:
    return fill(
        text,
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    sys.stdout.write(page())
