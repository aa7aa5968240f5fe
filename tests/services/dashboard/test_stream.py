"""Pending events of one reader: the newest of each section, and a whole state first."""

import json
from typing import Any

from rolloutmq.schemas.statistics.series import Fold, SeriesBook
from rolloutmq.services.dashboard.stream import Stream, Update, encoded_json, history_since


def update(book: SeriesBook | None = None, epoch: int = 0, ended: str = "") -> Update:
    return Update(epoch, book or SeriesBook({"a": {"x": Fold.MEAN}}), ended)


def events(data: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, rest = block.partition("\n")
        found.append((name.removeprefix("event: "), json.loads(rest.removeprefix("data: "))))
    return found


async def test_it_begins_whole_and_goes_on_with_changes() -> None:
    stream = Stream(update(), {"run": b"1", "queue": b"2"})
    assert await stream.wait(0)
    (state, history) = events(stream.take())
    assert state == ("state", {"full": True, "sections": {"run": 1, "queue": 2}})
    assert history[1]["reset"] is True
    assert not await stream.wait(0)
    stream.offer({"queue": b"3"}, update())
    assert await stream.wait(0)
    assert events(stream.take()) == [("state", {"full": False, "sections": {"queue": 3}})]
    assert stream.take() == b""


async def test_nothing_new_wakes_nobody() -> None:
    stream = Stream(update(), {})
    stream.take()
    stream.offer({}, update())
    assert not await stream.wait(0)


def test_what_waits_is_the_newest_of_each_section() -> None:
    book = SeriesBook({"a": {"x": Fold.MEAN}})
    stream = Stream(update(book), {"run": b"0"})
    for number in range(10_000):
        book.add("a", "", float(number), {"x": 1.0})
        stream.offer({"run": b"%d" % number}, update(book))
    data = stream.take()
    assert len(data) < 50_000
    state, history = events(data)
    assert state[1] == {"full": True, "sections": {"run": 9999}}
    assert len(history[1]["series"][0]["columns"]["t"]) <= 1024


def test_another_record_begins_again() -> None:
    stream = Stream(update(), {})
    stream.take()
    book = SeriesBook({"a": {"x": Fold.MEAN}})
    book.add("a", "", 1.0, {"x": 1.0})
    stream.offer({}, update(book, epoch=1))
    ((name, told),) = events(stream.take())
    assert (name, told["reset"], len(told["series"])) == ("history", True, 1)


def test_the_end_is_told_once_and_again_after_another_life() -> None:
    stream = Stream(update(), {})
    names = []
    for ended in ("", "over", "over", "", "over again"):
        stream.offer({}, update(ended=ended))
        names += [(name, data) for name, data in events(stream.take()) if name == "end"]
    assert names == [("end", {"text": "over"}), ("end", {"text": "over again"})]


def test_a_cursor_of_another_record_gets_everything() -> None:
    book = SeriesBook({"a": {"x": Fold.MEAN}})
    book.add("a", "", 1.0, {"x": 1.0})
    for cursor in (None, (1, 1), (7, 99)):
        told = history_since(update(book), cursor)
        assert (told["reset"], told["cursor"]) == (True, "0.1")
        assert len(told["series"]) == 1
    assert history_since(update(book), (0, 1))["series"] == []


def test_text_that_no_encoding_has_is_json_all_the_same() -> None:
    assert json.loads(encoded_json({"a": "\udcff"})) == {"a": "\udcff"}
    assert encoded_json([float("nan")]) == b"[null]"
