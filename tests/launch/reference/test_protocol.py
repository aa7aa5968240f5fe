"""The protocol reference."""

import re
import typing
from pathlib import Path

from rolloutmq.launch.reference.protocol import EVENTS, EXCHANGES, enums, page, structs
from rolloutmq.launch.reference.protocol_texts import MEANINGS
from rolloutmq.schemas.wire.replies import Ack, ErrorReply, Reply
from rolloutmq.schemas.wire.requests import Request
from rolloutmq.schemas.wire.telemetry import Event

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "protocol.md"


def test_the_page_is_that_of_the_structs() -> None:
    assert PAGE.read_text() == page(), "`make reference` writes it"


def test_every_request_and_reply_is_in_an_exchange_and_every_event_has_a_topic() -> None:
    assert {one.request for one in EXCHANGES} == set(typing.get_args(Request))
    found = {reply for one in EXCHANGES for reply in one.replies}
    assert found | {ErrorReply} == set(typing.get_args(Reply))
    assert {one.event for one in EVENTS} >= {*typing.get_args(Event), Ack}


def test_every_class_of_the_wire_has_one_section() -> None:
    headings = re.findall(r"^#+ (.+)$", page(), re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert {one.__name__ for one in [*structs(), *enums()]} <= set(headings)


def test_every_link_within_the_page_has_a_target() -> None:
    headings = re.findall(r"^#+ (.+)$", page(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", page())) <= anchors


def test_every_field_has_a_type_a_default_and_a_meaning() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert [line for line in rows if re.search(r"\|\s+\|", line)] == []
    assert "| `sequences` | int, at least 0, at most 2^24 | `0` | " in page()
    assert "| `id` | [TaskId](#scalar-types) | required | " in page()


def test_texts_of_members_belong_to_classes_of_the_wire() -> None:
    names = {one.__name__ for one in [*structs(), *enums()]}
    assert {key.partition(".")[0] for key in MEANINGS if "." in key} <= names
