import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import LaneStatus, LedgerCounts, Pressure
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.orchestrator.autoscaling.autoscaler import BUDGET, SHARE_S, Autoscaler
from rolloutmq.services.orchestrator.autoscaling.control_law import ControllerState, PressureController
from rolloutmq.services.orchestrator.autoscaling.decision_log import (
    DecisionLog,
    DecisionLogHeader,
    Resumed,
    read,
    replay,
)
from rolloutmq.services.orchestrator.autoscaling.pressure import (
    Decision,
    PressureSample,
    ServerLimit,
    WorkerCounts,
    WorkerRoom,
)


class Measured(PressureController):
    """Wants a number of workers whenever it hears something; decides on as many, or on `target`."""

    def __init__(self, law: PressureController, want: float, target: int | None = None) -> None:
        super().__init__(law.min_workers, law.max_workers, law.scaling)
        self.want = want
        self.target = target

    def decide(
        self, state: ControllerState, sample: PressureSample, now: float
    ) -> tuple[ControllerState, Decision]:
        news = sample.epoch, sample.number
        if news == state.news:
            return state, Decision(state.target, "hold: no news")
        most = self.max_workers if sample.room is None else sample.room.workers
        target = min(math.ceil(self.want) if self.target is None else self.target, most)
        bound = BUDGET if target < self.want else ""
        state = replace(state, news=news, target=target, wants=((now, self.want),))
        return state, Decision(target, "as measured", self.want, bound)


class Site:
    """Environments whose operators ask for numbers; what is started is ready at once, what goes drains for a while."""

    def __init__(
        self,
        tmp_path: Path,
        budget: int,
        alive: Mapping[str, int] | None = None,
        resumed: Mapping[str, Resumed] | None = None,
    ) -> None:
        usual = {"entry": "a:B", "min_workers": 1, "max_workers": 20}
        config = RunConfig.model_validate(
            {
                "environment": {"a": usual, "b": {**usual, "weight": 3.0}},
                "orchestrator": {"max_processes": budget},
            }
        )
        self.config = config
        log = DecisionLog(tmp_path / "decisions.jsonl")
        self.scaling = Autoscaler(config.environment, config.orchestrator, alive or {}, log, resumed)
        self.crews = {env: WorkerCounts(ready=(alive or {}).get(env, 0)) for env in "ab"}
        self.number, self.now = 0, 0.0
        self.lanes: tuple[LaneStatus, ...] = ()

    def measure(self, **wants: float) -> None:
        """Have the environments want these numbers from now on, as if they were measured."""
        for scale in self.scaling.scales:
            if scale.env in wants:
                scale.law = Measured(scale.law, wants[scale.env])

    def tick(
        self, rooms: Mapping[str, WorkerRoom] | None = None, *, news: bool = True, **wanted: int
    ) -> dict[str, int]:
        """Decide once and do what is decided; returns the targets.

        Args:
            rooms: Other limits.
            news: The broker has sent another message.
            wanted: Numbers of an operator.
        """
        self.number += news
        self.now += 1.0
        pressure = Pressure(
            epoch=1,
            number=self.number,
            at=0.0,
            rollout_pressure=1.0,
            queued_sequences=0,
            batch_sequences=8,
            queued_groups=0,
            queued_bytes=0,
            leased_bytes=0,
            high_bytes=0,
            step=0,
            consumed_per_s=0.0,
            produced_per_s=0.0,
            staleness_max=0,
            trainer_wait="",
            ledger=LedgerCounts(),
            lanes=self.lanes,
            workers=(),
            wanted=dict(wanted),
        )
        self.scaling.decide(self.crews, pressure, self.now, self.now, rooms)
        targets = {scale.env: scale.decision.target for scale in self.scaling.scales}
        for env, target in targets.items():
            crew = self.crews[env]
            gone = max(0, crew.ready - target)
            self.crews[env] = replace(crew, ready=crew.ready - gone, draining=crew.draining + gone)
        for env, number in self.scaling.starts(self.crews).items():
            crew = self.crews[env]
            self.crews[env] = replace(crew, ready=crew.ready + number)
        return targets

    @property
    def processes(self) -> int:
        return sum(crew.current + crew.draining for crew in self.crews.values())


def test_without_a_budget_everybody_gets_what_it_wants(tmp_path: Path) -> None:
    site = Site(tmp_path, 0)
    assert site.tick(a=20, b=20) == {"a": 20, "b": 20}
    assert site.processes == 40


def test_a_budget_is_kept_at_every_moment_and_places_are_free_when_processes_are_gone(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, 8)
    for _ in range(5):
        site.tick(a=20, b=1)
        assert site.processes <= 8
    assert site.crews["a"].ready == 7
    for _ in range(5):
        targets = site.tick(a=20, b=20)
        assert site.processes <= 8
    assert targets == {"a": 2, "b": 6}
    assert (site.crews["a"], site.crews["b"].ready) == (WorkerCounts(ready=2, draining=5), 1)
    site.crews["a"] = WorkerCounts(ready=2)
    site.tick(a=20, b=20)
    assert (site.crews["a"].ready, site.crews["b"].ready) == (2, 6)
    assert site.scaling.scales[0].said.bound == "budget"


def test_a_place_that_nobody_uses_any_more_goes_to_another_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, 8)
    for _ in range(5):
        site.tick(a=3, b=5)
    site.tick(a=2, b=6)
    site.crews["a"] = WorkerCounts(ready=2)
    for _ in range(3):
        site.tick(a=2, b=6)
    assert (site.crews["a"].ready, site.crews["b"].ready) == (2, 6)


def test_who_cannot_use_a_place_does_not_claim_it(tmp_path: Path) -> None:
    site = Site(tmp_path, 8)
    for _ in range(5):
        site.tick({"b": WorkerRoom(2, "no_gpu")}, a=6, b=20)
    assert {env: crew.ready for env, crew in site.crews.items()} == {"a": 6, "b": 2}


def test_the_narrowest_room_counts(tmp_path: Path) -> None:
    site = Site(tmp_path, 16)
    for _ in range(3):
        targets = site.tick({"a": WorkerRoom(2, "no_gpu")}, a=20, b=1)
    assert targets == {"a": 2, "b": 1}


def test_it_begins_with_those_that_live(tmp_path: Path) -> None:
    site = Site(tmp_path, 0, {"a": 5})
    assert site.tick() == {"a": 5, "b": 1}


def test_other_bounds_hold_from_the_next_decision_and_replay_exactly(tmp_path: Path) -> None:
    site = Site(tmp_path, 0)
    assert site.tick(a=20, b=2) == {"a": 20, "b": 2}
    environments = dict(site.config.environment)
    for least, most, wanted, target in ((1, 30, 40, 30), (1, 5, 40, 5), (7, 9, 1, 7)):
        update = {"min_workers": least, "max_workers": most}
        environments["a"] = site.config.environment["a"].model_copy(update=update)
        site.scaling.rebound(environments, 0)
        assert site.tick(a=wanted, b=2) == {"a": target, "b": 2}
        site.scaling.rebound(environments, 0)
    environments["a"] = site.config.environment["a"].model_copy(update={"min_workers": 9})
    site.scaling.rebound(environments, 0)
    assert site.tick()["a"] == 9, "a raised minimum needs no other reason"
    entries = list(read(tmp_path / "decisions.jsonl"))
    headers = [one for one in entries if isinstance(one, DecisionLogHeader) and one.env == "a"]
    assert [(one.min_workers, one.max_workers) for one in headers] == [
        (1, 20),
        (1, 30),
        (1, 5),
        (7, 9),
        (9, 20),
    ]
    again = replay(iter(entries))
    assert (again.decisions, again.differences, again.orphans) == (10, 0, 0)


def test_another_budget_holds_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, 8)
    for _ in range(5):
        site.tick(a=20, b=1)
    assert site.crews["a"].ready == 7
    site.scaling.rebound(site.config.environment, 4)
    assert site.tick(a=20, b=1) == {"a": 3, "b": 1}
    site.scaling.rebound(site.config.environment, 0)
    assert site.tick(a=20, b=1) == {"a": 20, "b": 1}


def test_what_is_measured_replaces_the_division_by_weights_at_once(tmp_path: Path) -> None:
    """A worker of `b`, which has three quarters of the batch, makes half as much again."""
    site = Site(tmp_path, budget=6)
    site.measure(b=8.0)
    site.tick()
    assert site.tick() == {"a": 1, "b": 5}, "nothing is known of `a`: the weights are 1:3"
    site.measure(a=4.0)
    site.tick()
    assert site.tick() == {"a": 2, "b": 4}


def test_a_tick_without_news_changes_no_division_and_no_bound(tmp_path: Path) -> None:
    site = Site(tmp_path, budget=6)
    site.measure(a=6.0, b=6.0)
    for _ in range(3):
        site.tick()
        site.crews = {env: replace(crew, draining=0) for env, crew in site.crews.items()}
    assert site.tick() == {"a": 3, "b": 3}
    said = [(scale.decision.want, scale.decision.bound) for scale in site.scaling.scales]
    assert said == [(6.0, BUDGET), (6.0, BUDGET)]
    for news in (False, False, True, False, True):
        assert site.tick(news=news) == {"a": 3, "b": 3}
        assert [(scale.decision.want, scale.decision.bound) for scale in site.scaling.scales] == said


def test_a_division_that_takes_one_worker_in_use_must_last(tmp_path: Path) -> None:
    site = Site(tmp_path, budget=6)
    site.measure(a=6.0, b=6.0)
    for _ in range(3):
        site.tick()
    site.measure(a=9.0, b=5.0)
    for _ in range(int(SHARE_S) - 5):
        assert site.tick() == {"a": 3, "b": 3}
    for _ in range(10):
        targets = site.tick()
    assert targets == {"a": 4, "b": 2}


SERVER: Final = ServerLimit(capacity=20.0, proven=20.0, best=1.0)
"""Two environments whose workers make 1/s each share inference servers of 20/s."""


def shared(tmp_path: Path, budget: int = 0) -> Site:
    """Return a site that knows the capacity of its servers, from an earlier orchestrator."""
    earlier = Site(tmp_path, budget).scaling.scales
    resumed = {scale.env: Resumed(scale.beginning(), scale.state, server=SERVER) for scale in earlier}
    return Site(tmp_path, budget, resumed=resumed)


def most(site: Site) -> dict[str, int]:
    """Return how many workers the inference servers feed."""
    return {scale.env: scale.server.most for scale in site.scaling.scales}


def ticks(site: Site, rooms: Mapping[str, WorkerRoom] | None = None) -> None:
    for _ in range(3):
        site.tick(rooms)
        site.crews = {env: replace(crew, draining=0) for env, crew in site.crews.items()}


@pytest.mark.parametrize("why", ["no_gpu", "given_up"])
def test_who_may_have_few_workers_leaves_its_share_of_the_servers(tmp_path: Path, why: str) -> None:
    site = shared(tmp_path)
    site.measure(a=50.0, b=50.0)
    ticks(site)
    assert most(site) == {"a": 5, "b": 15}, "by weight"
    ticks(site, {"b": WorkerRoom(2, why)})
    assert most(site) == {"a": 18, "b": 2}


def test_who_is_at_max_workers_leaves_its_share_of_the_servers(tmp_path: Path) -> None:
    site = shared(tmp_path)
    environments = dict(site.config.environment)
    environments["b"] = environments["b"].model_copy(update={"max_workers": 3})
    site.scaling.rebound(environments, 0)
    site.measure(a=50.0, b=50.0)
    ticks(site)
    assert most(site) == {"a": 17, "b": 3}


def test_an_earlier_division_of_the_budget_bounds_no_share_of_the_servers(tmp_path: Path) -> None:
    """Otherwise an environment that wanted little once could never have more: each would confirm the other."""
    site = shared(tmp_path, budget=20)
    site.measure(a=2.0, b=20.0)
    ticks(site)
    assert most(site) == {"a": 2, "b": 18}
    site.measure(a=20.0, b=20.0)
    ticks(site)
    ticks(site)
    assert most(site) == {"a": 5, "b": 15}
    assert site.tick() == {"a": 5, "b": 15}


def test_a_want_that_fluctuates_moves_no_worker_of_another(tmp_path: Path) -> None:
    site = shared(tmp_path)
    scale = site.scaling.scales[0]
    site.measure(b=50.0)
    found = set()
    for want in (3.6, 2.8, 4.1, 3.2, 2.9):
        scale.law = Measured(scale.law, want, target=4)
        ticks(site)
        found.add(most(site)["b"])
    assert found == {16}


def test_the_capacity_is_kept_with_the_measurements_and_not_without(tmp_path: Path) -> None:
    earlier = Site(tmp_path, 0).scaling.scales[0]
    header = earlier.beginning()
    for most_workers, known in ((20, True), (19, False)):
        last = Resumed(replace(header, max_workers=most_workers), header.state, server=SERVER)
        site = Site(tmp_path, 0, resumed={"a": last})
        site.tick()
        assert bool(site.scaling.scales[0].server.most) is known


def test_the_next_orchestrator_keeps_the_division_of_the_budget(tmp_path: Path) -> None:
    site = Site(tmp_path, budget=6)
    site.measure(a=6.0, b=6.0)
    for _ in range(3):
        site.tick()
        site.crews = {env: replace(crew, draining=0) for env, crew in site.crews.items()}
    resumed = {scale.env: Resumed(scale.beginning(), scale.state) for scale in site.scaling.scales}
    other = Site(tmp_path, budget=6, alive={"a": 3, "b": 3}, resumed=resumed)
    assert [scale.room for scale in other.scaling.scales] == [WorkerRoom(3, BUDGET), WorkerRoom(3, BUDGET)]


def test_what_is_said_is_told_again_once_a_second(tmp_path: Path) -> None:
    site = Site(tmp_path, 0)
    site.tick(a=2)
    scale, other = site.scaling.scales
    assert (scale.said.env, scale.said.target, scale.said.ready) == ("a", 2, 0)
    assert [one.is_news(1.0) for one in (scale, other)] == [True, True]
    assert not scale.is_news(1.5)
    site.tick(a=3)
    assert scale.is_news(1.5), "another target at once"
    assert not other.is_news(1.5)
    assert other.is_news(2.0)


def test_a_budget_below_the_fewest_is_no_configuration() -> None:
    with pytest.raises(ValueError, match=r"orchestrator\.max_processes: must be at least 2, .* \(got 1\)"):
        RunConfig.model_validate(
            {
                "environment": {name: {"entry": "a:B"} for name in "ab"},
                "orchestrator": {"max_processes": 1},
            }
        )


def lane(env: str, split: Split, weight: float) -> LaneStatus:
    return LaneStatus(env=env, split=split, weight=weight, min_share=0.0)


def test_an_environment_weighs_by_its_training_whatever_its_evaluation_does(tmp_path: Path) -> None:
    site = Site(tmp_path, 8)
    site.lanes = (lane("a", Split.TRAIN, 5.0), lane("a", Split.EVAL, 0.0), lane("b", Split.EVAL, 9.0))
    site.tick()
    assert {scale.env: scale.weight for scale in site.scaling.scales} == {"a": 5.0, "b": 3.0}


@pytest.mark.parametrize(("most", "target"), [(20, 7), (19, 2)])
def test_measurements_are_kept_unless_the_configuration_changed(
    tmp_path: Path, most: int, target: int
) -> None:
    earlier = Site(tmp_path, 0, {"a": 2}).scaling.scales[0]
    header = earlier.beginning()
    last = Resumed(replace(header, max_workers=most), replace(header.state, target=7))
    site = Site(tmp_path, 0, {"a": 2}, {"a": last})
    assert site.scaling.scales[0].state.target == target


def test_given_up_workers_hold_no_budget_and_nobody_starts_in_their_place(tmp_path: Path) -> None:
    site = Site(tmp_path, budget=6)
    site.tick(a=4, b=2)
    site.crews = {"a": WorkerCounts(ready=1, failed=3), "b": WorkerCounts(ready=2)}
    assert site.scaling.starts(site.crews) == {"a": 0, "b": 0}
    site.crews["a"] = WorkerCounts(ready=1, failed=1)
    assert site.scaling.starts(site.crews)["a"] == site.scaling.scales[0].decision.target - 2


def test_workers_that_joined_take_no_place_of_the_budget(tmp_path: Path) -> None:
    site = Site(tmp_path, budget=4)
    site.crews["a"] = WorkerCounts(ready=6, joined=6)
    for _ in range(3):
        targets = site.tick(a=8, b=2)
    assert targets == {"a": 8, "b": 2}
    own = {env: crew.current - crew.joined for env, crew in site.crews.items()}
    assert own == {"a": 2, "b": 2}


def test_one_that_failed_and_is_being_ended_holds_its_process(tmp_path: Path) -> None:
    site = Site(tmp_path, budget=0)
    site.tick(a=20)
    site.crews = {"a": WorkerCounts(ready=17, draining=2, failed=1), "b": WorkerCounts(ready=1)}
    assert site.scaling.starts(site.crews)["a"] == 1, "max_workers processes at most"
