"""Scenarios for controllers: changes of demand and of rates, crashes, shared servers, budgets, lost telemetry.

Each exists for every start-up time of workers. Where nothing else is said, a worker makes 2 sequences per second, and
twenty of them feed a demand of 40.
"""

import math
import random
from dataclasses import replace
from typing import Final

from rolloutmq.services.orchestrator.simulation.plant import CRASH_PAUSE_S
from rolloutmq.services.orchestrator.simulation.series import Series, constant, lines, square, steps
from rolloutmq.services.orchestrator.simulation.site import (
    EnvironmentSite,
    Scenario,
    ServerSite,
    Site,
    TrainerSite,
)

STARTS_S: Final = (2.0, 20.0, 60.0, 120.0)
LOW, HIGH, AFTER = 40.0, 80.0, 20.0
"""Demand in sequences per second: before the first step, after it, and after the second."""
STEADY: Final = 39.0
"""Slightly less than the throughput of twenty workers: without spare capacity every queue runs empty eventually."""
ENV: Final = "tool"
MOST_DEMAND: Final = 400.0
"""Demand that the most workers can feed."""
STEPS: Final = steps((0.0, LOW), (600.0, HIGH), (1200.0, AFTER))
TIMES: Final = (600.0, 1200.0)


def single(
    demand: Series, worker: EnvironmentSite, *, batch: int = 64, queue: int = 1000, queued: float = 0.0
) -> Site:
    """Return a site with one environment."""
    return Site(TrainerSite(demand, batch, queue, queued=queued), {ENV: worker})


def traced(name: str, demand: Series, start_s: float) -> Scenario:
    """Return the scenario of a recorded demand: enough workers run from its start, and figures count from the first
    change."""
    site = single(demand, EnvironmentSite(start_s=start_s))
    ready = math.ceil(site.need(ENV, 0.0) - 1e-9)
    since_s = next(
        (at for at, value in zip(demand.times, demand.values, strict=True) if value != demand.values[0]), 0.0
    )
    return Scenario(
        name,
        single(demand, EnvironmentSite(start_s=start_s, ready=ready)),
        lasts_s=demand.times[-1],
        since_s=since_s,
    )


def all_scenarios(start_s: float) -> list[Scenario]:
    """Return the scenarios for workers with this start-up time."""
    worker = EnvironmentSite(start_s=start_s)
    return [
        *_demands(worker),
        *_rates(worker),
        *_crashes(worker),
        *_servers(worker),
        *_budgets(worker),
        *_telemetry(worker),
    ]


def _demands(worker: EnvironmentSite) -> list[Scenario]:
    half_s = max(60.0, 4.0 * worker.start_s)
    lasts_s = max(1800.0, 10.0 * half_s)
    full = replace(worker, ready=20)
    large = steps((0.0, 10.0), (600.0, 60.0), (1500.0, 10.0))
    epochs = single(_epochs(8000.0, 400.0, 200.0, 3600.0), full, queue=16000)
    return [
        Scenario("start", single(constant(LOW), worker), is_fresh=True),
        Scenario("step", single(STEPS, full), TIMES),
        Scenario("large step", single(large, replace(worker, ready=5)), (600.0, 1500.0), 2400.0),
        Scenario("ramp", single(lines((300.0, LOW), (1200.0, HIGH), (2100.0, LOW)), full), lasts_s=2400.0),
        Scenario("waves", single(_wave(40.0, 20.0, 1200.0, 4800.0), full), lasts_s=4800.0),
        Scenario("square", single(square(half_s, LOW, HIGH, lasts_s), full), lasts_s=lasts_s),
        Scenario("bursts", single(_bursts(20.0, 80.0, 3600.0), replace(worker, ready=10)), lasts_s=3600.0),
        Scenario("pauses", single(_pauses(LOW, 3600.0), full), lasts_s=3600.0),
        Scenario("noise", single(constant(STEADY), full, queued=96.0), lasts_s=3600.0),
        Scenario(
            "groups",
            single(constant(STEADY), replace(full, group_sequences=16), queued=96.0),
            lasts_s=4200.0,
            since_s=600.0,
        ),
        Scenario(
            "few groups",
            single(
                constant(1.2),
                replace(worker, ready=6, per_worker=constant(0.2), group_sequences=8),
                queue=480,
                queued=96.0,
            ),
            lasts_s=6600.0,
            since_s=1200.0,
        ),
        Scenario("long steps", single(STEPS, full, batch=1200, queue=6000), TIMES, unseen_s=75.0),
        Scenario("epochs", epochs, lasts_s=3600.0, since_s=20.0),
        Scenario(
            "few",
            single(
                steps((0.0, 2.0), (600.0, 8.0), (1200.0, 2.0)), replace(worker, ready=1), batch=16, queue=200
            ),
            TIMES,
        ),
        Scenario("first batch", single(constant(LOW), worker, batch=8192, queue=24576), is_fresh=True),
        Scenario("return", _returning(full), (720.0, 900.0), 1800.0),
    ]


def _rates(worker: EnvironmentSite) -> list[Scenario]:
    full = replace(worker, ready=20)
    slower = replace(full, per_worker=steps((0.0, 2.0), (600.0, 1.0), (1500.0, 2.0)))
    longer = replace(full, per_worker=lines((300.0, 2.0), (3300.0, 0.8)))
    return [
        Scenario("rates", single(constant(STEADY), slower), (600.0, 1500.0), 2400.0),
        Scenario("lengths grow", single(constant(STEADY), longer), lasts_s=3600.0),
        Scenario("long rollouts", single(STEPS, replace(full, rollout_s=60.0), queue=6000), TIMES),
    ]


def _crashes(worker: EnvironmentSite) -> list[Scenario]:
    down_s = worker.start_s + CRASH_PAUSE_S
    full, outage = replace(worker, ready=20), (300.0, 360.0)
    return [
        Scenario("failing starts", single(STEPS, replace(full, failing_starts=0.3)), TIMES),
        Scenario("available 0.9", single(STEPS, replace(full, life_s=9.0 * down_s)), TIMES),
        Scenario("available 0.5", single(STEPS, replace(full, life_s=down_s)), TIMES),
        Scenario(
            "few crash",
            single(constant(5.0), replace(worker, ready=5, life_s=down_s), queued=96.0),
            lasts_s=4800.0,
            since_s=1200.0,
        ),
        Scenario("lost", single(constant(STEADY), replace(full, lost=((600.0, 10),))), (600.0,)),
        Scenario("outage", single(constant(STEADY), replace(full, outages=(outage,)), queued=96.0)),
    ]


def _servers(worker: EnvironmentSite) -> list[Scenario]:
    """Return scenarios of a server whose engine has the capacity of twenty workers."""
    shared = replace(worker, server="engine")
    lasts_s = 10.0 * (worker.start_s + 10.0) + 1800.0

    def site(demand: Series, engines: int = 1) -> Site:
        return Site(TrainerSite(demand), {ENV: shared}, {"engine": ServerSite(constant(40.0), engines)})

    later = steps((0.0, 20.0), (400.0, HIGH), (1800.0, 20.0))
    slow = Site(
        TrainerSite(constant(HIGH), 256, 8000),
        {ENV: replace(shared, rollout_s=90.0)},
        {"engine": ServerSite(constant(40.0))},
    )
    two = Site(
        TrainerSite(constant(120.0)),
        {"math": replace(shared, weight=2.0), "code": replace(shared, per_worker=constant(1.0))},
        {"engine": ServerSite(constant(40.0))},
    )
    return [
        *(
            Scenario(f"shared {times}x", site(constant(40.0 * times)), lasts_s=lasts_s, is_fresh=True)
            for times in (2, 4, 6)
        ),
        *(
            Scenario(name, site(constant(demand), 4), lasts_s=lasts_s + 3600.0, is_fresh=True)
            for name, demand in (
                ("shared engines", 100.0),
                ("shared engines, all", 240.0),
                ("shared engines, just", 120.0),
            )
        ),
        Scenario("shared later", site(later), (400.0, 1800.0), 3000.0),
        Scenario("shared long rollouts", slow, lasts_s=lasts_s + 1500.0, is_fresh=True),
        Scenario("shared by two", two, lasts_s=lasts_s, is_fresh=True),
    ]


def _budgets(worker: EnvironmentSite) -> list[Scenario]:
    heavy, light = replace(worker, weight=3.0), replace(worker, weight=1.0)
    fast = replace(light, per_worker=constant(8.0))
    trainer = TrainerSite(constant(LOW))
    return [
        Scenario("budget", Site(trainer, {"math": heavy, "code": light}), max_processes=6, is_fresh=True),
        Scenario(
            "budget of unlike", Site(trainer, {"math": light, "code": fast}), max_processes=12, is_fresh=True
        ),
        Scenario(
            "two",
            Site(TrainerSite(STEPS), {"math": replace(heavy, ready=15), "code": replace(fast, ready=2)}),
            TIMES,
        ),
    ]


def _telemetry(worker: EnvironmentSite) -> list[Scenario]:
    step = Scenario("step", single(STEPS, replace(worker, ready=20)), TIMES)
    return [
        replace(step, name="loss 10 %", loss=0.1),
        replace(step, name="loss 50 %", loss=0.5),
        replace(step, name="dark 60 s", dark=(610.0, 670.0), unseen_s=60.0),
        replace(step, name="restart", restart_at=700.0),
        replace(step, name="clock jump", jump=(700.0, 3600.0)),
    ]


def _wave(mean: float, swing: float, period_s: float, lasts_s: float) -> Series:
    points = range(0, int(lasts_s) + 1, 30)
    return lines(*((float(at), mean + swing * math.sin(2.0 * math.pi * at / period_s)) for at in points))


def _bursts(low: float, high: float, lasts_s: float) -> Series:
    """Return a demand with bursts of 20 to 90 s, 60 to 400 s apart."""
    chance, at, points = random.Random(7), 300.0, [(0.0, low)]
    while at < lasts_s:
        burst_s = chance.uniform(20.0, 90.0)
        points += [(at, high), (at + burst_s, low)]
        at += burst_s + chance.uniform(60.0, 400.0)
    return steps(*points)


def _pauses(demand: float, lasts_s: float) -> Series:
    """Return a demand with a pause of 75 s, as for an evaluation, every 375 s."""
    points = [(0.0, demand)]
    for at in range(300, int(lasts_s), 375):
        points += [(float(at), 0.0), (at + 75.0, demand)]
    return steps(*points)


def _epochs(size: float, rate: float, every_s: float, lasts_s: float) -> Series:
    """Return the demand of a trainer that consumes so many sequences at once, and then none for a while."""
    points = []
    for at in range(0, int(lasts_s), int(every_s)):
        points += [(float(at), rate), (at + size / rate, 0.0)]
    return steps(*points)


def _returning(worker: EnvironmentSite) -> Site:
    """Return a site whose trainer leaves for two minutes, and is faster for three minutes once it is back."""
    demand = steps((0.0, LOW), (600.0, HIGH), (900.0, LOW))
    return Site(TrainerSite(demand, away=((600.0, 720.0),)), {ENV: worker})
