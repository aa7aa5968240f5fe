from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.errors import DamagedFileError
from rolloutmq.services.gateway.atropos_wire import RegisterEnv, Registration
from rolloutmq.services.gateway.registry import (
    GONE_KEPT,
    LEAST_WEIGHT,
    Environment,
    RegisterProgram,
    Registry,
    RegistryState,
    lane_name,
)
from rolloutmq.services.gateway.service import registrations_of

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
    return msgspec.structs.asdict(made.standing(env(made, env_id), queued or {}, step=3, batch=16))


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


def program(worker: str, share: float | None = None) -> RegisterProgram:
    return RegisterProgram(100, "maths", 1.0, 4, share, worker=worker, lane="e")


def test_workers_share_the_lane_of_their_environment() -> None:
    made = registry()
    for number in range(3):
        made.enrol(program(f"e-{number}"), 0.0)
    assert [one.lane for one in made.book.environments] == ["e"] * 3
    assert told(made, 0, {"e": 8})["self_queue_size"] == 2
    assert told(made, 0, {"e": 8})["queue_size"] == 2
    assert told(made, 0)["env_weight"] == pytest.approx(1 / 3)


def test_the_minimum_share_of_a_lane_counts_once() -> None:
    made = registry(0.2)
    for number in range(3):
        made.enrol(program(f"e-{number}", 0.5), 0.0)
    assert told(made, 0)["unallocated_fraction"] == pytest.approx(0.3)
    assert made.share(env(made, 1)) == 0.5


def test_workers_count_again_at_their_first_request_to_the_next_gateway() -> None:
    made = registry(None)
    for number in range(3):
        made.enrol(program(f"e-{number}"), 0.0)
    again = Registry(made.book, absent_s=60.0, now=1.0)
    assert [one.env_id for one in again.here()] == [0]
    again.hear(env(again, 2), 2.0)
    assert [one.env_id for one in again.here()] == [0, 2]


def test_a_restarted_worker_replaces_its_earlier_registration() -> None:
    made = registry()
    first = made.enrol(program("e-0"), 0.0)
    second = made.enrol(program("e-0"), 1.0)
    assert made.here() == [second]
    assert made.of_worker("e-0") is second
    assert made.of_worker("e-1") is None
    made.hear(first, 2.0)  # a late request of the earlier process
    assert made.here() == [first, second]


def test_a_month_of_restarts_leaves_a_small_book() -> None:
    """Eight environments, each restarted every hour for thirty days."""
    present, hours = 8, 30 * 24
    made = Registry(RegistryState(trainer=TRAINER), absent_s=60.0, now=0.0)
    numbers: list[int] = []
    for hour in range(hours):
        now = hour * 3600.0
        enrolled = [made.enrol(RegisterEnv(100, "gsm8k", 1.0, 4, None), now) for _ in range(present)]
        numbers += [one.env_id for one in enrolled]
        made.vanished(now + 3599.0)
    assert numbers == list(range(present * hours))
    assert len(msgspec.json.encode(made.book)) < 100_000
    assert made.book.environments[-1].wandb_name == f"gsm8k_{numbers[-1]}"
    again = Registry(msgspec.json.decode(msgspec.json.encode(made.book), type=RegistryState), 60.0, now)
    assert again.enrol(RegisterEnv(100, "gsm8k", 1.0, 4, None), now).env_id == present * hours
    assert again.find(numbers[0]) is None
    assert again.find(numbers[-1]) is not None


def test_whoever_left_first_is_forgotten_and_nobody_present_is() -> None:
    made = registry()
    stays = made.enrol(RegisterEnv(100, "stays", 1.0, 4, None), 0.0)
    for number in range(GONE_KEPT):
        made.leave(made.enrol(RegisterEnv(100, "e", 1.0, 4, None), float(number)))
    made.hear(env(made, 1), 1000.0)
    made.leave(env(made, 1))
    for _ in range(2):
        made.leave(made.enrol(RegisterEnv(100, "e", 1.0, 4, None), 2000.0))
    newest = made.enrol(RegisterEnv(100, "e", 1.0, 4, None), 3000.0)
    assert made.here() == [stays, newest]
    assert [number for number in range(6) if made.find(number) is None] == [2, 3]


def test_a_late_request_of_a_forgotten_environment_changes_nothing() -> None:
    made = registry(None)
    first = env(made, 0)
    made.leave(first)
    for _ in range(GONE_KEPT):
        made.leave(made.enrol(RegisterEnv(100, "e", 1.0, 4, None), 1.0))
    made.enrol(RegisterEnv(100, "e", 1.0, 4, None), 1.0)
    assert made.find(0) is None
    made.hear(first, 2.0)
    made.saw(first, 8)
    made.leave(first)
    assert first not in made.here()
    assert made.group_size(first) == 4


def test_the_numbers_go_on_where_an_earlier_version_left_them() -> None:
    book = registry(None, None).book
    book.next_env_id = 0
    assert Registry(book, 60.0, 0.0).enrol(RegisterEnv(100, "e", 1.0, 4, None), 0.0).env_id == 2


def test_shares_that_an_earlier_version_let_in_do_no_harm() -> None:
    made = registry(1e308, -3.0)
    assert told(made, 0, {"e-1": 4})["unallocated_fraction"] == 0.0
    assert made.share(env(made, 1)) == 0.0


def test_an_environment_needs_a_lane_that_nobody_else_will_need() -> None:
    made = registry(None, None)
    assert made.crowded(2, used=())
    assert not made.crowded(3, used=())
    assert not made.crowded(2, used={"e-0"})
    made.leave(env(made, 1))
    assert not made.crowded(1, used={"e-0"})


def test_a_name_without_a_number_counts_for_none() -> None:
    made = registry(None, None)
    made.book.environments[1] = msgspec.structs.replace(made.book.environments[1], wandb_name="renamed")
    later = Registry(made.book, 60.0, 0.0)
    assert later.enrol(RegisterEnv(100, "e", 1.0), 1.0).wandb_name == "e_1"


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"group_size":4', b'"group_size":0'), (b'"env_id":0', b'"env_id":-1'), (b'"e_0"', b'"\xff"')],
)
def test_registrations_that_are_damaged_are_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "registrations.json"
    assert registrations_of(path) == RegistryState()
    text = msgspec.json.encode(registry(None).book)
    path.write_bytes(text)
    assert len(registrations_of(path).environments) == 1
    path.write_bytes(text.replace(old, new))
    with pytest.raises(DamagedFileError, match=r"registrations\.json"):
        registrations_of(path)
