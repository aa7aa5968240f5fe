"""Many remote producers on one keyed broker: start, steady load, a killed broker, and killed processes.

A round with 1,000 producers in 20 processes stands beside one with 10 in one process, at the same rate. At the end of
each the ledger is checked against the logs of the producers and the trainer.

    python -m benchmarks.network.fleet PROCESSES PRODUCERS    one round, its figures as JSON; PRODUCERS in each process
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Final

from benchmarks.harness import cpu
from benchmarks.harness.row import Row, within
from benchmarks.network.fleet_site import Fleet, fleet

RATE: Final = 400.0
"""Groups a second in total."""
STEADY_S: Final = 10.0
SETTLE_S: Final = 3.0
KILLED: Final = 2
"""Processes that are killed and replaced, one after the other."""
LARGE: Final = (20, 50)
SMALL: Final = (1, 10)
"""Processes, and producers of each."""
ROUNDS: Final = 3
BACK_GOAL_S: Final = 30.0


@dataclass
class Round:
    """Figures of one round."""

    open_s: float = 0.0
    """From the first connection until each producer had an ack."""
    open_cpu_s: float = 0.0
    """CPU of the broker in that time."""
    rate: float = 0.0
    """Groups a second under the steady load."""
    cpu_us: float = 0.0
    """CPU of the broker for a group under the steady load, in microseconds."""
    clients_cpu: float = 0.0
    """CPU of the producers under that load, in cores."""
    idle_cpu: float = 0.0
    """CPU of the broker without groups, in cores."""
    back_s: float = 0.0
    """From the kill of the broker until each producer had an ack of the next one."""
    back_cpu_s: float = 0.0
    replaced_s: list[float] = field(default_factory=list)
    """From the kill of a process until each producer of the next one had an ack."""
    others_s: list[float] = field(default_factory=list)
    """Longest wait of a producer for an ack after that."""
    rss_mb: float = 0.0
    descriptors: int = 0
    rss_back_mb: float = 0.0
    descriptors_back: int = 0
    accepted: int = 0
    problems: int = 0
    """Contradictions between the ledger and the logs of the clients."""

    @property
    def growth(self) -> float:
        """Descriptors of the broker after the kills over those before."""
        return self.descriptors_back / self.descriptors


def rows() -> Iterator[Row]:
    """What a thousand producers cost, beside ten."""
    pairs = [(measured(*LARGE), measured(*SMALL)) for _ in range(ROUNDS)]

    def row(figure: str, of: Callable[[Round], float], goal: float | None = None) -> Row:
        large, small = (iter([of(one) for one in side]) for side in zip(*pairs, strict=True))
        return within(
            f"{figure}, os",
            "1,000 remote producers in 20 processes",
            lambda: next(large),
            lambda: next(small),
            "10 of them in one process",
            goal,
            ROUNDS,
        )

    yield row("remote producers, from the first connection until each has an ack, s", lambda one: one.open_s)
    yield row(
        "remote producers, from the kill of the broker until each has an ack again, s",
        lambda one: one.back_s,
        BACK_GOAL_S,
    )
    yield row(
        "longest wait for an ack after a process of producers was replaced, s", lambda one: max(one.others_s)
    )
    yield row("CPU of the broker for a group of remote producers, µs", lambda one: one.cpu_us)
    yield row("CPU of the broker without groups, cores", lambda one: one.idle_cpu)
    yield row("memory of the broker after the kills, MB", lambda one: one.rss_back_mb)
    yield row("descriptors of the broker after the kills, of those before", lambda one: one.growth, 1.1)
    both = [one for pair in pairs for one in pair]
    yield within(
        "contradictions of the ledger after the kills, os",
        f"{ROUNDS} rounds of 1,000 remote producers, and of 10",
        lambda: float(sum(one.problems for one in both)),
        lambda: float(sum(one.accepted for one in both)),
        "groups accepted",
        0.0,
        1,
    )


def measured(processes: int, each: int) -> Round:
    """Run one round."""
    found = Round()
    with fleet(processes, each) as site:
        _open(site, found)
        _load(site, found)
        _kill_broker(site, found)
        _kill_producers(site, found, min(KILLED, processes))
        found.rss_back_mb, found.descriptors_back = site.rss_mb(), site.descriptors()
        found.accepted, found.problems = site.end()
    return found


def _open(site: Fleet, found: Round) -> None:
    began, before = time.monotonic(), cpu.spent_s(site.pid)
    found.open_s = site.ask("open")[0] - began
    found.open_cpu_s = cpu.spent_s(site.pid) - before
    _note(f"open {found.open_s:.1f} cpu {found.open_cpu_s:.1f}")
    found.rss_mb, found.descriptors = site.rss_mb(), site.descriptors()
    time.sleep(SETTLE_S)
    before, began = cpu.spent_s(site.pid), time.monotonic()
    time.sleep(STEADY_S / 2)
    found.idle_cpu = (cpu.spent_s(site.pid) - before) / (time.monotonic() - began)
    _note(f"idle {found.idle_cpu:.3f}")


def _load(site: Fleet, found: Round) -> None:
    site.load(RATE)
    time.sleep(SETTLE_S)
    acked, before, began = site.acked(), cpu.spent_s(site.pid), time.monotonic()
    clients = site.clients_cpu_s()
    time.sleep(STEADY_S)
    spent, took = cpu.spent_s(site.pid) - before, time.monotonic() - began
    found.clients_cpu = (site.clients_cpu_s() - clients) / took
    groups = site.acked() - acked
    found.rate, found.cpu_us = groups / took, spent / groups * 1e6
    _note(f"steady {found.rate:.0f}/s cpu {found.cpu_us:.0f} us clients {found.clients_cpu:.2f}")


def _kill_broker(site: Fleet, found: Round) -> None:
    began = time.monotonic()
    site.kill_broker()
    site.start_broker()
    found.back_s = site.ask("probe")[0] - began
    found.back_cpu_s = cpu.spent_s(site.pid)
    _note(f"back {found.back_s:.1f} cpu {found.back_cpu_s:.1f}")


def _kill_producers(site: Fleet, found: Round, killed: int) -> None:
    for place in range(killed):
        found.replaced_s.append(site.replace(place))
        _note(f"replaced {found.replaced_s[-1]:.1f}")
        found.others_s.append(site.ask("probe")[1])


def _note(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(json.dumps(asdict(measured(int(sys.argv[1]), int(sys.argv[2]))), indent=1))
