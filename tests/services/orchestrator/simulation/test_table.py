"""The lines of a table below a row: what a shared server makes, and the bounds that are broken, with their limits."""

from dataclasses import replace

from rolloutmq.services.orchestrator.simulation.table import table
from rolloutmq.services.orchestrator.simulation.verdict import Bound, Figure, Verdict

NONE = Figure(0.0, 0.0)
VERDICT = Verdict(
    scenario="shared",
    env="math",
    start_s=20.0,
    law="rolloutmq",
    seeds=2,
    peak_need=20.0,
    starved_s=NONE,
    waste=Figure(0.4, 0.5, 4.0),
    moves=NONE,
    least_moves=0,
    turns=0,
    flips=Figure(7.0, 9.0),
    settle_s=(),
    peak=NONE,
    blocked_s=NONE,
    throughput_per_s=Figure(39.75, 36.0, 0.994),
    engines=None,
    bounds=(
        Bound("flips", 7.0, 9.0, 6.0, 9.0),
        Bound("starved", 5.0, 6.0, 25.0, 37.5, "s"),
        Bound("waste", 0.4, 0.5, 0.25, 0.375, "x"),
        Bound("settle", 160.04, 233.0, 156.0, 234.0, "s"),
        Bound("throughput", 0.9, 0.8, 0.97, 0.0, "x", is_least=True),
        Bound("engines", 1.0, 1.0, 3.0, 3.0, is_least=True),
    ),
    broken=("flips", "waste", "settle", "throughput", "engines"),
)


def lines(one: Verdict) -> list[str]:
    return [line.strip() for line in "".join(table([one])).splitlines()[3:]]


def test_each_broken_bound_stands_beside_its_limits() -> None:
    assert lines(VERDICT) == [
        "breaks: flips 7/9, at most 6/9",
        "breaks: waste 40/50 %, at most 25/37.5 %",
        "breaks: settle 160/233 s, at most 156/234 s",
        "breaks: throughput 90/80 %, at least 97 %",
        "breaks: engines 1/1, at least 3/3",
    ]


def test_a_shared_server_has_its_throughput_and_its_engines() -> None:
    assert lines(replace(VERDICT, engines=Figure(2.0, 3.0, 1.0), bounds=())) == [
        "makes 39.8/36.0 sequences/s 1.0x, engines 2/3 1.0x"
    ]
