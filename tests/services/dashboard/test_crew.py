"""The list of workers: sorted, filtered, cut."""

from typing import Any

import pytest

from rolloutmq.services.dashboard.crew import ROWS_LIMIT, SORTS, page_of
from rolloutmq.services.monitor.status.worker_view import WorkerRow

CREW = [
    WorkerRow(worker="a-10", env="a", state="ready", produced=5, age_s=3.0),
    WorkerRow(worker="a-2", env="a", state="waiting", produced=None, reason="Disk FULL", crashes=2),
    WorkerRow(worker="b-1", env="b", state="ready", produced=9, age_s=1.0, silent_s=9.0),
]


def names(**asked: Any) -> list[str]:
    known: dict[str, Any] = {"sort": "worker", "descending": False, "wanted": "", "offset": 0, "limit": 10}
    return [row["worker"] for row in page_of(CREW, **{**known, **asked})["rows"]]


def test_by_name_with_numbers_by_value() -> None:
    assert names() == ["a-2", "a-10", "b-1"]
    assert names(descending=True) == ["b-1", "a-10", "a-2"]


def test_unknown_values_come_last_either_way() -> None:
    assert names(sort="produced") == ["a-10", "b-1", "a-2"]
    assert names(sort="produced", descending=True) == ["b-1", "a-10", "a-2"]


def test_equal_values_keep_the_order_of_names() -> None:
    assert names(sort="env") == ["a-2", "a-10", "b-1"]


@pytest.mark.parametrize("wanted", ["full", "WAITING", "a-2"])
def test_a_filter_finds_any_text(wanted: str) -> None:
    assert names(wanted=wanted) == ["a-2"]
    assert names(wanted="silent") == ["b-1"], "a silent worker is shown as such"


@pytest.mark.parametrize("sort", SORTS)
def test_every_column_sorts(sort: str) -> None:
    assert sorted(names(sort=sort)) == ["a-10", "a-2", "b-1"]


def test_a_page_is_cut_and_bounded() -> None:
    assert names(offset=1, limit=1) == ["a-10"]
    assert names(offset=9) == []
    many = [WorkerRow(worker=f"w-{number}", env="w", state="ready") for number in range(ROWS_LIMIT + 5)]
    told = page_of(many, sort="worker", descending=False, wanted="", offset=0, limit=1 << 60)
    assert (told["total"], told["matching"], len(told["rows"])) == (
        ROWS_LIMIT + 5,
        ROWS_LIMIT + 5,
        ROWS_LIMIT,
    )


def test_an_unwell_worker_says_why() -> None:
    rows = page_of(CREW, sort="worker", descending=False, wanted="", offset=0, limit=9)["rows"]
    assert [(row["unwell"], bool(row["trouble"])) for row in rows] == [
        (True, True),
        (False, False),
        (True, True),
    ]
