"""Load balancing: the live engine with the fewest requests in flight."""

import random
from collections import Counter

import pytest

from rolloutmq.bus.engine_registry import SILENT_S
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.openai.engine_choice import (
    GIVEN_UP_S,
    LOOK_S,
    PASS_S,
    PROBE_MAX_S,
    STUCK_S,
    Engine,
    Engines,
)


class Directory:
    """Addresses that a test may change; each look finds those that live a beat on."""

    def __init__(self, *names: str) -> None:
        self.addresses = {name: InferenceAddress(url=f"http://{name}", pid=1, name=name) for name in names}
        self.hanging: set[str] = set()
        self.looks = 0

    def change(self, name: str, **fields: object) -> None:
        old = self.addresses.get(name) or InferenceAddress(url=f"http://{name}", pid=1, name=name)
        kept = {key: getattr(old, key) for key in old.__struct_fields__}
        self.addresses[name] = InferenceAddress(**{**kept, **fields})

    def listed(self) -> list[InferenceAddress]:
        self.looks += 1
        for name in self.addresses.keys() - self.hanging:
            self.change(name, number=self.addresses[name].number + 1)
        return list(self.addresses.values())


def taken(engines: Engines, now: float) -> Engine:
    engine = engines.take(now)
    assert engine is not None
    engine.in_hand += 1
    return engine


def test_nothing_is_chosen_where_nobody_is() -> None:
    assert Engines(Directory().listed, random.Random(0)).take(0.0) is None


def test_what_is_in_hand_is_kept_even() -> None:
    engines = Engines(Directory("a", "b", "c").listed, random.Random(0))
    chosen = Counter(taken(engines, 0.0).url for _ in range(300))
    assert chosen == {"http://a": 100, "http://b": 100, "http://c": 100}


def test_one_that_is_slower_is_asked_less() -> None:
    engines = Engines(Directory("slow", "quick").listed, random.Random(0))
    asked: Counter[str] = Counter()
    for _ in range(100):
        engine = taken(engines, 0.0)
        asked[engine.url] += 1
        if engine.url == "http://quick":
            engine.in_hand -= 1
    assert asked["http://slow"] == 1


def test_ties_are_drawn_and_the_same_seed_draws_the_same() -> None:
    def first(seed: int) -> str:
        return taken(Engines(Directory("a", "b").listed, random.Random(seed)), 0.0).url

    found = [first(seed) for seed in range(200)]
    assert 70 < found.count("http://a") < 130
    assert found == [first(seed) for seed in range(200)]


def test_one_that_comes_is_noticed_and_asked_until_it_is_even() -> None:
    directory = Directory("a")
    engines = Engines(directory.listed, random.Random(0))
    for _ in range(6):
        taken(engines, 0.0)
    directory.change("b")
    assert taken(engines, LOOK_S / 2).url == "http://a"
    assert [taken(engines, LOOK_S).url for _ in range(7)] == ["http://b"] * 7
    assert LOOK_S <= 1.0
    assert directory.looks == 2


def test_one_that_drains_is_left_alone_and_one_that_went_forgotten() -> None:
    directory = Directory("a", "b")
    engines = Engines(directory.listed, random.Random(0))
    engines.take(0.0)
    directory.change("a", draining=True)
    assert {taken(engines, 1.0).url for _ in range(9)} == {"http://b"}
    del directory.addresses["b"]
    assert engines.take(2.0) is None


def test_one_that_failed_is_passed_over_and_tried_again_later() -> None:
    engines = Engines(Directory("a", "b").listed, random.Random(0))
    bad = taken(engines, 0.0)
    bad.in_hand -= 1
    assert engines.pass_over(bad, 0.0)  # another may be asked at once
    good = taken(engines, 0.1)
    assert good is not bad
    assert taken(engines, 0.2) is good
    assert not engines.pass_over(good, 0.3)
    assert taken(engines, 0.3) is bad  # nobody is left: the one with the least to answer
    assert taken(engines, PASS_S) is bad


def test_a_single_engine_is_never_out_of_the_choice() -> None:
    engines = Engines(Directory("a").listed, random.Random(0))
    only = taken(engines, 0.0)
    assert not engines.pass_over(only, 0.0)
    assert taken(engines, 0.0) is only


def test_another_life_at_the_same_address_is_asked_at_once() -> None:
    directory = Directory("a", "b")
    engines = Engines(directory.listed, random.Random(0))
    while (dead := taken(engines, 0.0)).url != "http://a":
        pass
    dead.model = "old"
    directory.change("a", pid=2)
    assert engines.pass_over(dead, 0.1)
    new = taken(engines, 0.1)
    assert (new.url, new.model, new.passed_until) == ("http://a", "", float("-inf"))


def test_one_whose_address_stands_still_is_asked_only_where_no_other_is() -> None:
    directory = Directory("a", "b")
    engines = Engines(directory.listed, random.Random(0))
    engines.take(0.0)
    directory.hanging = {"a"}
    engines.take(1.0)
    late = 1.1 + SILENT_S
    assert {taken(engines, late).url for _ in range(20)} == {"http://b"}
    directory.hanging = {"a", "b"}
    assert taken(engines, late + 10.0).url == "http://a"
    directory.hanging = set()
    assert not taken(engines, late + 20.0).silent


@pytest.mark.parametrize("url", ["http://x/v1", "http://x/v1/", "http://x/", "http://x"])
def test_an_address_may_end_as_it_likes(url: str) -> None:
    engines = Engines(lambda: [InferenceAddress(url=url, pid=0)], random.Random(0))
    assert taken(engines, 0.0).url == "http://x"


def at(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, step)


def test_an_engine_whose_weights_are_stuck_is_not_asked() -> None:
    """Each of its groups was dropped as stale, thousands in a minute, and nothing said why."""
    directory, policy = Directory("a", "b"), at(9)
    engines = Engines(directory.listed, random.Random(0), lambda: policy, max_staleness=2)
    directory.change("a", version=at(1))
    directory.change("b", version=at(9))
    assert {taken(engines, 0.0).name for _ in range(2)} == {"a", "b"}, "it may be about to move"
    later = STUCK_S + 1
    assert {taken(engines, later).name for _ in range(4)} == {"b"}
    policy = at(12)
    assert engines.take(later + LOOK_S) is None
    assert engines.missing == (
        "engine b serves version 0.9, 3 steps behind the trainer, and no other for 6 s; its groups would be too stale: "
        "see to the relay of its host"
    )
    directory.change("a", version=at(12))
    assert taken(engines, later + 2 * LOOK_S).name == "a"


@pytest.mark.parametrize(
    ("version", "max_staleness"), [(at(7), 2), (at(1), None), (None, 2), (at(1, 1), 2)], ids=repr
)
def test_an_engine_is_asked_unless_its_groups_would_surely_be_dropped(
    version: PolicyVersion | None, max_staleness: int | None
) -> None:
    directory = Directory("a")
    directory.change("a", version=version)
    engines = Engines(directory.listed, random.Random(0), lambda: at(9), max_staleness)
    for now in (0.0, STUCK_S + 1):
        assert taken(engines, now).name == "a"


def missing(engines: Engines, name: str, now: float) -> Engine:
    """Miss an engine, as a call at it does."""
    while (found := taken(engines, now)).name != name:
        pass
    found.in_hand -= 1
    engines.missed(found, now, "no route")
    return found


def test_one_out_of_reach_is_left_to_probes_that_become_rare() -> None:
    """Every rollout lost seconds at it, once a second."""
    engines = Engines(Directory("a", "b").listed, random.Random(0))
    gone = missing(engines, "a", 0.0)
    assert not engines.to_probe(PASS_S / 2)
    now, pauses = 0.0, []
    for _ in range(8):
        while not (due := engines.to_probe(now)):
            assert {taken(engines, now).name for _ in range(9)} == {"b"}
            now += 0.5
        assert due == [gone]
        assert not engines.to_probe(now), "one probe at a time"
        pauses.append(now)
        engines.missed(gone, now, "no route")
        gone.probed = False
    assert [round(b - a) for a, b in zip([0.0, *pauses], pauses, strict=False)] == [
        1,
        2,
        4,
        8,
        15,
        15,
        15,
        15,
    ]
    assert engines.away() == {"a": "no route"}
    assert pauses[-1] - pauses[-2] == PROBE_MAX_S
    engines.reached(gone)
    assert engines.away() == {}
    assert taken(engines, now) is gone


def test_misses_at_the_same_time_count_once() -> None:
    engines = Engines(Directory("a", "b").listed, random.Random(0))
    gone = missing(engines, "a", 0.0)
    for _ in range(7):
        assert engines.missed(gone, 0.1, "no route")
    assert gone.misses == 1


def test_a_worker_gives_up_once_every_living_engine_is_out_of_reach_for_long() -> None:
    directory = Directory("a", "b")
    engines = Engines(directory.listed, random.Random(0))
    missing(engines, "a", 0.0)
    assert not engines.gives_up(GIVEN_UP_S + 1), "b may be asked"
    missing(engines, "b", 10.0)
    assert not engines.gives_up(GIVEN_UP_S + 1)
    for second in range(11, 26):
        assert taken(engines, float(second)), "none is left, so they are asked"
    assert engines.gives_up(10.0 + GIVEN_UP_S)
    directory.hanging = {"a", "b"}
    later = 40.0 + SILENT_S
    for now in (40.0, later):
        engines.take(now)
    assert not engines.gives_up(later), "engines that have ended come back, and rollouts wait for them"


def test_engines_without_heartbeats_are_never_given_up() -> None:
    engines = Engines(lambda: [InferenceAddress(url="http://x", pid=0)], random.Random(0))
    only = taken(engines, 0.0)
    engines.missed(only, 0.0, "no route")
    assert not engines.gives_up(1000.0)
