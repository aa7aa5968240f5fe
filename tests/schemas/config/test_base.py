"""What all sections have in common."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rolloutmq.schemas.config.base import INTEGER_LIMIT, PROCESSES_LIMIT, Section, Text
from rolloutmq.schemas.config.losses import LossConfig
from rolloutmq.schemas.config.run import RunConfig


def sections(below: type[Section] = Section) -> Iterator[type[Section]]:
    for section in below.__subclasses__():
        yield section
        yield from sections(section)


SECTIONS = [one for one in sections() if one.__module__.startswith("rolloutmq.")]
DEFAULTS = {
    type(field.default): field.default
    for section in SECTIONS
    for field in section.model_fields.values()
    if isinstance(field.default, Section) and not field.default.model_fields_set
}


def test_they_are_found() -> None:
    assert RunConfig in SECTIONS
    assert len(DEFAULTS) > 12


@pytest.mark.parametrize("section", DEFAULTS)
def test_a_default_is_what_an_empty_section_becomes(section: type[Section]) -> None:
    default = DEFAULTS[section]
    assert default == section.model_validate({})
    assert default == section.model_validate(default.model_dump())
    assert default.model_fields_set == set()


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_is_refused_and_no_section_can_be_changed(section: type[Section]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        section.model_validate({"unknown": 1})
    made = section.model_construct()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, next(iter(section.model_fields)), 1)


def problems(section: type[Section], tree: Any) -> dict[tuple[int | str, ...], str]:
    """Return the type of each error, by its location."""
    try:
        section.model_validate(tree)
    except ValidationError as error:
        return {one["loc"]: one["type"] for one in error.errors()}
    return {}


TYPED = [
    pytest.param(section, name, kind, id=f"{section.__name__}.{name}")
    for section in SECTIONS
    for name, field in section.model_fields.items()
    for kind in (int, float, bool)
    if field.annotation in (kind, kind | None)
]


@pytest.mark.parametrize(("section", "name", "kind"), TYPED)
def test_a_text_is_neither_a_number_nor_true_and_true_is_no_number(
    section: type[Section], name: str, kind: type
) -> None:
    unfit = f"{kind.__name__}_type"
    assert problems(section, {name: "1"}).get((name,)) == unfit
    assert (problems(section, {name: True}).get((name,)) == unfit) is (kind is not bool)
    for value in (1, Text("1")):
        assert problems(section, {name: value}).get((name,)) != unfit
    if kind is int:
        assert problems(section, {name: INTEGER_LIMIT + 1}).get((name,)) in {"less_than_equal", "less_than"}


def test_numbers_in_lists_have_types_too() -> None:
    tree = {"environment": {"a": {"entry": "a:B"}}, "curriculum": {"a": {"scores": ["0", True]}}}
    at = ("curriculum", "a", "scores")
    assert problems(RunConfig, tree) == {(*at, 0): "float_type", (*at, 1): "float_type"}


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("environment.a", ("min_workers", "max_workers")),
        ("inference", ("min_engines", "max_engines")),
        ("orchestrator", ("max_processes",)),
        ("trainer", ("ranks",)),
    ],
)
def test_what_becomes_processes_has_a_limit(section: str, keys: tuple[str, ...]) -> None:
    path = tuple(section.split("."))
    for key in keys:
        tree: Any = {key: PROCESSES_LIMIT + 1}
        for part in reversed(path):
            tree = {part: tree}
        assert problems(RunConfig, tree)[(*path, key)] == "less_than_equal"


def test_a_section_in_another_type_has_no_second_check() -> None:
    first, second = (str(TypeAdapter[Any](LossConfig).core_schema).count("function-before") for _ in range(2))
    assert first == second > 0
