"""Figures as text."""

import pytest

from rolloutmq.schemas.wire.control import LedgerCounts
from rolloutmq.services.monitor.text import format


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (300 << 20, "300 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_amount(nbytes: int, text: str) -> None:
    assert format.amount(nbytes) == text


def test_portion_is_in_the_unit_of_the_whole() -> None:
    assert format.portion(6.2 * (1 << 20), 256 << 20) == "6.2/256 MiB"
    assert format.portion(130 << 20, 256 << 20) == "130/256 MiB"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3661, "1:01:01"), (-3, "0:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert format.clock(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.0, "    "), (0.5, "██  "), (0.53, "██▏ "), (1.0, "████"), (7.0, "████"), (-1.0, "    ")],
)
def test_bar(fraction: float, text: str) -> None:
    assert format.bar(fraction, 4) == text


def test_sparkline_shows_the_course_and_bounds_its_width() -> None:
    assert format.sparkline([0.0, 0.5, 1.0], 10, 0.0, 1.0) == "▁▅█"
    assert format.sparkline([0.0] * 50 + [1.0] * 50, 2, 0.0, 1.0) == "▁█"
    assert format.sparkline([1.0, 1.0], 5, 1.0, 1.0) == "▁▁"
    assert format.sparkline([], 5, 0.0, 1.0) == ""
    assert format.sparkline([1.0], 0, 0.0, 1.0) == ""


def test_accounts_name_only_places_that_hold_groups() -> None:
    ledger = LedgerCounts(accepted=10, queued=3, trained=2, committed=5)

    assert format.accounts(ledger) == "accepted 10 = queued 3 + trained 2 + committed 5"
    assert format.accounts(ledger, short=True) == "accepted 10 = queued 3 + trained 7"
    assert format.accounts(LedgerCounts()) == "accepted 0 = 0"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00 us"), (0.00084, "840 us"), (0.0523, "52.3 ms"), (1.338, "1.34 s"), (999.0, "999 s")],
)
def test_durations_have_three_digits(value: float, text: str) -> None:
    assert format.seconds(value) == text
    assert format.seconds_pair(value, value).split("/")[1] == text


def test_two_durations_share_the_unit_of_the_longer() -> None:
    assert format.seconds_pair(0.0954, 0.914) == "95.4/914 ms"
    assert format.seconds_pair(0.05, 2.0) == "0.05/2.00 s"
