"""Comparison of all controllers on scenarios: the same seeds for each, on several processes.

Every trial is independent and deterministic, so the number of processes changes no figure.
"""

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from rolloutmq.services.orchestrator.simulation.controllers import CONTROLLERS, REFERENCE
from rolloutmq.services.orchestrator.simulation.site import Scenario
from rolloutmq.services.orchestrator.simulation.trial import Outcome, try_out
from rolloutmq.services.orchestrator.simulation.verdict import Verdict, judged

FEW_S: Final = 20_000.0
"""Simulated seconds below which other processes would take longer to start than the trials."""

Trial = tuple[Scenario, str, int]
"""Scenario, name of the controller, and seed."""


def compared(
    scenarios: Sequence[Scenario], seeds: int, laws: Sequence[str] = tuple(CONTROLLERS), processes: int = 1
) -> Iterator[Verdict]:
    """Yield the verdicts, by scenario, environment and controller, in this order.

    Args:
        scenarios: The scenarios.
        seeds: Trials of each controller in each scenario.
        laws: Controllers; the reference fleet runs in any case.
        processes: Processes that run trials at once. Those beyond the first are started anew: the main module of the
            program must be importable.
    """
    trials = [trial for scenario in scenarios for trial in _trials(scenario, seeds, laws)]
    length_s = sum(scenario.lasts_s for scenario, _, _ in trials)
    outcomes = _serial(trials) if processes < 2 or length_s < FEW_S else _parallel(trials, processes)
    for scenario in scenarios:
        yield from _verdicts(scenario, seeds, laws, outcomes)


def processors() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _trials(scenario: Scenario, seeds: int, laws: Sequence[str]) -> Iterator[Trial]:
    """Yield the trials of a scenario: of the reference fleet first, and without crashes after those with them."""
    for law in (REFERENCE, *(law for law in laws if law != REFERENCE)):
        yield from ((scenario, law, seed) for seed in range(seeds))
        if scenario.has_crashes and law in laws:
            calm = scenario.without_crashes
            yield from ((calm, law, seed) for seed in range(seeds))


def _verdicts(
    scenario: Scenario, seeds: int, laws: Sequence[str], outcomes: Iterator[dict[str, Outcome]]
) -> list[Verdict]:
    """Judge the outcomes of `_trials`."""
    verdicts: dict[str, list[Verdict]] = {}
    reference: list[dict[str, Outcome]] = []
    for law in (REFERENCE, *(law for law in laws if law != REFERENCE)):
        found = list(itertools.islice(outcomes, seeds))
        reference = reference or found
        if law in laws:
            uncrashed = list(itertools.islice(outcomes, seeds)) if scenario.has_crashes else None
            verdicts[law] = judged(scenario, law, found, reference, uncrashed)
    return [verdicts[law][env] for env in range(len(scenario.site.environments)) for law in laws]


def _serial(trials: Sequence[Trial]) -> Iterator[dict[str, Outcome]]:
    return map(_tried, trials)


def _parallel(trials: Sequence[Trial], processes: int) -> Iterator[dict[str, Outcome]]:
    started = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(trials)), started, _follow_parent) as pool:
        try:
            yield from pool.map(_tried, trials)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the first process, which ends the others, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tried(trial: Trial) -> dict[str, Outcome]:
    scenario, law, seed = trial
    return try_out(scenario, CONTROLLERS[law], seed)
