from typing import Any

import pytest

from rolloutmq.services.gateway.atropos_wire import RegisterEnv, Registration
from rolloutmq.services.gateway.registry import LEAST_WEIGHT, Environment, Registry, RegistryState, lane_name

TRAINER = Registration("g", "p", 16, 64, "c", 1, 0, 10)


def registry(*shares: float | None, group_size: int = 4, weight: float = 1.0) -> Registry:
    made = Registry(RegistryState(trainer=TRAINER), absent_s=60.0, now=0.0)
    for share in shares:
        made.enrol(RegisterEnv(100, "e", weight, group_size, share), 0.0)
    return made


def env(made: Registry, env_id: int) -> Environment:
    found = made.find(env_id)
    assert found is not None
    return found


def told(made: Registry, env_id: int, queued: dict[str, int] | None = None) -> dict[str, Any]:
    return made.standing(env(made, env_id), queued or {}, step=3, batch=16)


def test_names_count_up_and_lanes_are_never_the_same() -> None:
    made = registry(None, None)
    assert [one.wandb_name for one in made.book.environments] == ["e_0", "e_1"]
    assert [one.lane for one in made.book.environments] == ["e-0", "e-1"]
    assert made.find(2) is None
    assert made.find(-1) is None


@pytest.mark.parametrize(
    ("desired", "lane"),
    [("a b/ü", "a-b-3"), ("", "env-3"), ("../..", "env-3"), ("x" * 99, "x" * 48 + "-3")],
)
def test_any_name_becomes_one_that_the_bus_allows(desired: str, lane: str) -> None:
    assert lane_name(desired, 3) == lane


def test_weights_are_shared_among_those_that_are_there() -> None:
    made = registry(None, None, None, None)
    assert told(made, 0)["env_weight"] == 0.25
    made.leave(env(made, 3))
    made.leave(env(made, 2))
    assert told(made, 0)["env_weight"] == 0.5
    made.hear(env(made, 3), 1.0)
    assert told(made, 0)["env_weight"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_without_any_weight_everybody_gets_the_least(weight: float) -> None:
    made = registry(None, None, weight=weight)
    assert told(made, 0)["env_weight"] == LEAST_WEIGHT


def test_the_queue_is_told_in_groups_of_the_own_size() -> None:
    made = registry(None, None)
    status = told(made, 0, {"e-0": 8, "e-1": 5})
    assert status["self_queue_size"] == 2
    assert status["max_group_size"] == 4
    assert status["queue_size"] == 4, "two of its own; those of the other fill two groups"


def test_single_sequences_of_others_count_too() -> None:
    made = registry(None, None, group_size=1)
    assert told(made, 0, {"e-1": 7})["queue_size"] == 7


def test_what_others_have_within_their_minimum_share_does_not_count() -> None:
    made = registry(None, 0.5)
    status = told(made, 0, {"e-0": 0, "e-1": 12})
    assert status["unallocated_fraction"] == 0.5
    assert status["queue_size"] == 1
    made.leave(env(made, 1))
    assert told(made, 0, {"e-1": 12})["queue_size"] == 3, "who is gone keeps no share"


def test_larger_groups_than_registered_are_the_size() -> None:
    made = registry(None)
    made.saw(env(made, 0), 16)
    assert told(made, 0, {"e-0": 32})["queue_size"] == 2


def test_who_is_not_heard_has_vanished_and_comes_back() -> None:
    made = registry(None, None)
    made.hear(env(made, 0), 50.0)
    assert [one.env_id for one in made.vanished(61.0)] == [1]
    assert made.vanished(61.0) == []
    made.hear(env(made, 1), 62.0)
    assert len(made.here()) == 2


def test_shares_beyond_the_whole_are_scaled() -> None:
    made = registry(0.8, 0.8, None)
    assert made.share(env(made, 0)) == pytest.approx(0.5)
    assert made.share(env(made, 2)) == 0.0
    assert told(made, 2)["unallocated_fraction"] == 0.0


def test_shares_within_the_whole_are_as_they_were_asked_for() -> None:
    made = registry(0.3, 0.2, None)
    assert [made.share(env(made, number)) for number in range(3)] == [0.3, 0.2, 0.0]
    assert told(made, 2)["unallocated_fraction"] == 0.5


def test_forgotten_environments_keep_their_numbers_and_count_when_they_are_heard() -> None:
    made = registry(None)
    made.forget()
    assert not made.here()
    new = made.enrol(RegisterEnv(100, "e", 1.0, 4, None), 1.0)
    assert (new.env_id, new.wandb_name) == (1, "e_0")
    made.hear(env(made, 0), 2.0)
    assert [one.env_id for one in made.here()] == [0, 1]


def test_who_was_there_counts_after_a_restart() -> None:
    book = registry(None, None).book
    again = Registry(book, 60.0, 1000.0)
    assert len(again.here()) == 2
    assert len(again.vanished(1061.0)) == 2
