"""The page of all keys of a configuration, `docs/reference/configuration.md`, made of the models that check them.

The docstring under a field is the only description of its key.
"""

import ast
import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import PurePath
from textwrap import dedent, fill
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel

from rolloutmq.launch.settings import is_section, kinds_of
from rolloutmq.schemas.config.base import Section
from rolloutmq.schemas.config.run import RunConfig

HEAD: Final = """\
# Configuration reference

Set a key in a TOML file, by the variable `ROLLOUTMQ_SECTION__KEY`, or by `--set section.key=value`; the last wins.
Unknown keys are refused, and values of another type in a file: neither `"4"` nor `true` is a number. Names have the
unit, brackets the default. `rolloutmq set` changes some keys of an active run.

This page is generated from the models in `schemas/config/` by `make reference`."""
NOT_SAID: Final = frozenset({"base_dir"})
"""Keys without an entry: the reader of the file fills them in."""
WIDTH: Final = 120
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20))

Kinds = Mapping[str, BaseModel]
"""Kinds a section can have, by `name`, each with its defaults; one kind with an empty name if there is no choice."""


def page() -> str:
    """Return the page as Markdown."""
    return "\n\n".join([HEAD, *sections(RunConfig.model_construct())]) + "\n"


def sections(root: BaseModel) -> Iterator[str]:
    """Yield the paragraphs of all sections of a file, given its defaults."""
    return _section("", {"": root})


def _section(path: str, kinds: Kinds) -> Iterator[str]:
    """Yield the paragraphs of a section and of its subsections."""
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
    """Return the section under a key, its default kind first; empty if the key is a value."""
    annotation = _annotation(name, kinds)
    if choices := kinds_of(annotation):
        usual = type(getattr(next(iter(kinds.values())), name))
        ordered = sorted(choices.items(), key=lambda choice: choice[1] is not usual)
        return {label: kind.model_construct() for label, kind in ordered}
    if is_section(annotation):
        return {label: getattr(kind, name) for label, kind in kinds.items()}
    # One kind for each name, or an optional section.
    return next(({"": part.model_construct()} for part in get_args(annotation) if is_section(part)), {})


def _suffix(name: str, kinds: Kinds) -> str:
    return ".NAME" if get_origin(_annotation(name, kinds)) is dict else ""


def _about(path: str, kinds: Kinds) -> str:
    """Return the description of a section; its name is the title."""
    texts = {_plain(type(kind).__doc__).removeprefix(f"`[{path}]`: "): label for label, kind in kinds.items()}
    if len(texts) == 1:
        (text,) = texts
        return fill(text[:1].upper() + text[1:], WIDTH)
    return "\n".join(_item(f"`name = {json.dumps(label)}`: {text}") for text, label in texts.items())


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
    """Return the docstring under a field, or under the field it overrides."""
    bases = (base for base in kind.__mro__ if issubclass(base, Section))
    return next((_plain(text) for base in bases if (text := _docstrings(base).get(name))), "")


@cache
def _docstrings(kind: type[Section]) -> Mapping[str, str]:
    """Return the docstrings under the fields that a class declares itself.

    Pydantic can read them too, but then every process that reads a configuration parses the source of all its models.
    """
    (definition,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in pairwise(definition.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = str(text.value.value)
    return found


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
