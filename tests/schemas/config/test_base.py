"""What all sections have in common."""

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from rolloutmq.schemas.config.base import Section
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
