"""Ranks as processes over gloo, compared with a single-rank trainer."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from tests.trainer.support.rank_player import STEPS, UNEVEN, config_of, groups_of, taught_by
from tests.trainer.support.toy import MemoryBroker
from tests.trainer.support.vllm_receiver import receiving
from tests.trainer.test_broker_client import config_of as run_of
from tests.trainer.test_broker_client import ids, producing, wait_until

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, EndOfReplayError
from rolloutmq.schemas.files import RunLayout, SettledBatch, VllmAddress
from rolloutmq.schemas.process import MISSED_FELLOW
from rolloutmq.schemas.wire.distillation import TeacherLogprobs
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.server import running_broker
from rolloutmq.trainer import checkpoint
from rolloutmq.trainer import ranks as meeting
from rolloutmq.trainer.checkpoint import Checkpoint
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.process import Stop, StoppedError
from rolloutmq.trainer.ranks import Lockstep, Ranks, RankSilentError, met

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0


@contextmanager
def process(*words: object, log: Path | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-W", "error:FSDP2-wrapped:UserWarning", "-m", *map(str, words)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))),
    }
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("wb")) if log else None
        started = stack.enter_context(subprocess.Popen(command, env=env, stderr=errors))
        try:
            yield started
        finally:
            started.kill()


def play(
    root: Path,
    size: int,
    dtype: str = "float32",
    dies_at: int = 0,
    teacher_logprobs: TeacherLogprobs = TeacherLogprobs.NONE,
) -> list[int]:
    """Run all ranks to their end, and return their exit codes."""
    root.mkdir(exist_ok=True)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                process(
                    "tests.trainer.support.rank_player", root, rank, size, dtype, dies_at, teacher_logprobs
                )
            )
            for rank in range(size)
        ]
        return [one.wait(PATIENCE_S) for one in ranks]


def told(root: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((root / f"rank{rank}.told").read_bytes())
    return found


def assert_no_thread_of_gloo_is_left(root: Path) -> None:
    """One that is may drop a tensor while the interpreter ends, and then the process aborts."""
    for rank in range(2):
        threads = msgspec.json.decode((root / f"rank{rank}.threads").read_bytes())
        assert any("gloo" in name for name in threads["during"])
        assert not [name for name in threads["after"] if "gloo" in name or "tcpstore" in name]


def newest(root: Path) -> Checkpoint:
    found = checkpoint.latest(RunLayout(root).checkpoints)
    assert found is not None
    return found


def standing(root: Path) -> dict[int, list[str]]:
    """Trained groups by the step of their line, without the void lines."""
    kept: list[SettledBatch] = []
    for text in RunLayout(root).trained.read_bytes().splitlines():
        line = msgspec.json.decode(text, type=SettledBatch)
        kept = [old for old in kept if not line.resumed or old.version.step <= line.version.step]
        kept.append(line)
    return {line.version.step: sorted(line.trained) for line in kept if line.trained}


@pytest.mark.parametrize(
    ("teacher_logprobs", "dtype"),
    [
        pytest.param(TeacherLogprobs.NONE, "float32", marks=pytest.mark.extended),
        pytest.param(TeacherLogprobs.NONE, "bfloat16", marks=pytest.mark.extended),
        (TeacherLogprobs.TOP_K, "float32"),
        pytest.param(TeacherLogprobs.TOP_K, "bfloat16", marks=pytest.mark.extended),
        pytest.param(TeacherLogprobs.FULL, "float32", marks=pytest.mark.extended),
        pytest.param(TeacherLogprobs.SAMPLED, "float32", marks=pytest.mark.extended),
    ],
)
def test_two_ranks_come_to_where_one_comes(
    tmp_path: Path, teacher_logprobs: TeacherLogprobs, dtype: str
) -> None:
    """Also from a teacher, of whom one rank learns beside rewards and the other without any."""
    alone = RunLayout(tmp_path / "alone")
    broker = MemoryBroker(groups_of(0, 1, teacher_logprobs))
    train(config_of(dtype, distillation=taught_by(teacher_logprobs)), alone, Stop(), broker.connect)
    assert play(tmp_path / "two", 2, dtype, teacher_logprobs=teacher_logprobs) == [0, 0]
    assert_no_thread_of_gloo_is_left(tmp_path / "two")

    one, two = newest(alone.root), newest(tmp_path / "two")
    assert two.state.version == one.state.version == PolicyVersion(0, STEPS)
    rtol, atol = (1e-3, 1e-5) if dtype == "float32" else (0.05, 4e-3)
    assert one.weights.keys() == two.weights.keys()
    for name, tensor in one.weights.items():
        assert two.weights[name].dtype == tensor.dtype
        torch.testing.assert_close(two.weights[name], tensor, rtol=rtol, atol=atol, msg=name)
    assert one.optimizer.keys() == two.optimizer.keys()
    for name, tensor in one.optimizer.items():
        assert two.optimizer[name].shape == tensor.shape
        if name.startswith(("exp_avg.", "exp_avg_sq.")) and tensor.norm() > 0:
            # Adam hides the size of a gradient from the weights; a mean where a sum belongs is half of these.
            apart = (two.optimizer[name] - tensor).norm() / tensor.norm()
            assert apart < (1e-2 if dtype == "float32" else 0.2), name

    leads, other = told(tmp_path / "two", 0), told(tmp_path / "two", 1)
    expected = {str(event.step): event.loss for event in broker.events}
    assert leads["losses"] == pytest.approx(expected, rel=1e-3 if dtype == "float32" else 0.1, abs=1e-3)
    for event in broker.events:
        assert leads["metrics"][str(event.step)] == pytest.approx(
            event.extra, rel=1e-3 if dtype == "float32" else 0.1, abs=1e-3
        )
        assert ("distill_kl" in event.extra) == (teacher_logprobs is not TeacherLogprobs.NONE)
    assert leads["groups"] == {str(step): 4 for step in range(1, STEPS + 1)}
    assert other["losses"] == {}
    assert (leads["commits"][-1], other["commits"]) == (STEPS, [])
    for (step, own), (same, others) in zip(leads["settled"], other["settled"], strict=True):
        assert step == same
        assert not set(own) & set(others)
        assert len(own) + len(others) == 4
        assert len(others) == (0 if step == UNEVEN else 2)
    assert standing(tmp_path / "two") == standing(alone.root)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_send_each_step_to_vllm_whole(tmp_path: Path, dtype: str) -> None:
    with receiving() as server:
        layout = RunLayout(tmp_path)
        write_json(layout.vllm, VllmAddress(url=server.url, nonce="one"))
        assert play(tmp_path, 2, dtype) == [0, 0]
        assert server.finished() == [f"0.{step}" for step in range(STEPS + 1)]
        saved = newest(tmp_path).weights
        assert all(torch.equal(tensor, saved[name]) for name, tensor in server.received.items())
        assert len(server.received) > 10
        assert not layout.weights.exists()


@pytest.mark.extended
def test_ranks_that_were_killed_go_on_exactly_and_one_rank_can_go_on_from_them(tmp_path: Path) -> None:
    assert play(tmp_path / "unbroken", 2) == [0, 0]
    assert play(tmp_path / "broken", 2, dies_at=4) == [9, 9]
    assert newest(tmp_path / "broken").state.version == PolicyVersion(0, 2)
    assert play(tmp_path / "broken", 2) == [0, 0]
    one, two = newest(tmp_path / "unbroken"), newest(tmp_path / "broken")
    assert two.state.version == PolicyVersion(1, STEPS)
    for ours, theirs in ((one.weights, two.weights), (one.optimizer, two.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert standing(tmp_path / "broken") == standing(tmp_path / "unbroken")

    layout = RunLayout(tmp_path / "broken")
    longer = config_of("float32", ranks=1)
    longer = longer.model_copy(update={"trainer": longer.trainer.model_copy(update={"steps": STEPS + 1})})
    assert train(longer, layout, Stop(), MemoryBroker(groups_of(0, 1)).connect) == PolicyVersion(2, STEPS + 1)


def test_no_rank_listens_beyond_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the store nor gloo, whatever interface the user's environment names for trainers of several hosts."""
    outside = next((name for name in psutil.net_if_addrs() if name != meeting.LOOPBACK), "absent0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside)
    with ExitStack() as stack:
        words = "tests.trainer.support.rank_sockets", tmp_path
        ranks = [stack.enter_context(process(*words, rank)) for rank in range(2)]
        assert [one.wait(PATIENCE_S) for one in ranks] == [0, 0]
    hosts = [msgspec.json.decode((tmp_path / f"rank{rank}.listens").read_bytes()) for rank in range(2)]
    assert all(hosts), "each rank has at least the socket of gloo"
    assert len(hosts[0]) > len(hosts[1]), "the first rank has the store, too"
    assert {ip_address(host).is_loopback for each in hosts for host in each} == {True}, hosts


@pytest.mark.extended
def test_ranks_that_fail_leave_no_thread_behind_either(tmp_path: Path) -> None:
    """Neither the one that fails nor the one that loses it."""
    assert play(tmp_path, 2, "bfloat16", dies_at=-3) == [1, 1]
    assert_no_thread_of_gloo_is_left(tmp_path)
    assert play(tmp_path, 2, "bfloat16") == [0, 0]


@pytest.mark.extended
def test_two_ranks_of_a_real_broker_learn_what_one_learns(tmp_path: Path) -> None:
    weights = []
    for ranks in (1, 2):
        layout = RunLayout(tmp_path / f"ranks{ranks}")
        layout.root.mkdir(mode=0o700)
        config = _fixed(run_of(steps=6, ranks=ranks))
        layout.config.write_text(config.model_dump_json())
        with ExitStack() as stack:
            stack.enter_context(running_broker(config, layout))
            stack.enter_context(producing(layout))
            words = "rolloutmq.launch.cli", "trainer", "--run-dir", layout.root, "--rank"
            started = [stack.enter_context(process(*words, rank)) for rank in range(ranks)]
            assert [one.wait(PATIENCE_S) for one in started] == [0] * ranks
        assert len(ids(layout)) == len(set(ids(layout))) == 4 * 6
        assert not layout.weights.exists()
        weights.append((standing(layout.root), newest(layout.root).weights))
    (groups, one), (same, two) = weights
    assert groups == same
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.extended
def test_a_rank_that_dies_takes_the_others_along_and_all_come_back(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir(mode=0o700)
    config = _fixed(run_of(steps=30, ranks=2))
    layout.config.write_text(config.model_dump_json())
    words = "rolloutmq.launch.cli", "trainer", "--run-dir", layout.root, "--rank"
    with running_broker(config, layout), producing(layout):
        with process(*words, 0, log=tmp_path / "said") as first, process(*words, 1) as second:
            wait_until(lambda: checkpoint.latest(layout.checkpoints) is not None)
            second.kill()
            assert first.wait(PATIENCE_S) == 1
        assert (
            (tmp_path / "said")
            .read_text()
            .endswith("error: another rank of the trainer has ended; see its log\n")
        )
        with process(*words, 1) as second, process(*words, 0) as first:  # in any order
            assert [first.wait(PATIENCE_S), second.wait(PATIENCE_S)] == [0, 0]
    assert newest(layout.root).state.version == PolicyVersion(1, 30)
    assert len(ids(layout)) == len(set(ids(layout))) == 4 * 30


def _fixed(config: RunConfig) -> RunConfig:
    """Nothing is held back or dropped because of its age, so that batches do not depend on time."""
    environment = EnvironmentConfig(entry="a:B", group_size=4, pacing=False, stale="pass")
    return config.model_copy(update={"environment": {"toy": environment}})


@dataclass
class Told(Ranks):
    """A rank whose fellow says what is given here, or less."""

    fellow: int = 0
    size: int = 2

    def most(self, value: int) -> int:
        return max(value, self.fellow)


class Part:
    def __init__(self, lease: int, generation: int = 1) -> None:
        self.lease = lease
        self.generation = generation


def test_a_part_is_held_until_all_ranks_have_theirs() -> None:
    lockstep: Lockstep[Part] = Lockstep(ranks := Told())
    part, asked = Part(7), []

    def ask() -> Part:
        asked.append(part)
        return part

    lockstep._all_of_one_lease = lambda: True  # type: ignore[method-assign]
    ranks.fellow = 1  # has nothing yet
    assert lockstep.pull(ask) is None
    assert lockstep.pull(ask) is None
    ranks.fellow = 0
    assert lockstep.pull(ask) is part
    assert asked == [part]


class Pair:
    """Two ranks that speak in turn, in threads."""

    def __init__(self) -> None:
        self._said = [0, 0]
        self._meeting = threading.Barrier(2, timeout=20.0)

    def of(self, number: int) -> Ranks:
        ranks = Told()

        def most(value: int) -> int:
            self._said[number] = value
            self._meeting.wait()
            found = max(self._said)
            self._meeting.wait()
            return found

        ranks.most = most  # type: ignore[method-assign]
        return ranks


@pytest.mark.parametrize("numbers", [(57, 1), (7, 8), (8, 7)])
def test_parts_of_different_leases_are_let_go_and_asked_for_again(numbers: tuple[int, int]) -> None:
    """The lease that is alive may have the smaller number: a broker that keeps nothing begins anew with 1."""
    pair, dead, alive = Pair(), Part(numbers[0]), Part(numbers[1])

    def pulled(number: int, given: list[Part]) -> list[Part | None]:
        lockstep: Lockstep[Part] = Lockstep(pair.of(number))
        return [lockstep.pull(lambda: given.pop(0)) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pulled, 0, [dead, alive])
        second = pool.submit(pulled, 1, [alive, alive])
        assert first.result() == second.result() == [None, alive]


@pytest.mark.parametrize(("fellow", "error"), [(3, StoppedError), (2, EndOfReplayError)])
def test_what_ends_one_rank_ends_all(fellow: int, error: type[BaseException]) -> None:
    with pytest.raises(error):
        Lockstep[Part](Told(fellow=fellow)).pull(lambda: Part(1))

    def raises() -> Part:
        raise error("mine")

    with pytest.raises(error):
        Lockstep[Part](Ranks()).pull(raises)


def test_a_rank_that_is_alone_agrees_with_itself() -> None:
    part = Part(3)
    assert Lockstep[Part](Ranks()).pull(lambda: part) is part
    assert Lockstep[Part](Ranks()).pull(lambda: None) is None
    assert Ranks().sums(1, 2) == [1, 2]


def test_whoever_comes_back_too_early_waits_for_the_next_meeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank still has the old meeting open, and has not noticed yet that its fellow is gone."""
    old = meeting._opened(file := tmp_path / "ranks.json")
    old.set("which", "old")
    old.set(meeting._BEGUN, "")
    looks, listens = threading.Semaphore(0), meeting._listens

    def noted(port: int) -> bool:
        looks.release()
        return listens(port)

    monkeypatch.setattr(meeting, "_listens", noted)
    with ThreadPoolExecutor(1) as pool:
        finding = pool.submit(meeting._found, file, 20.0)
        assert looks.acquire(timeout=20.0)
        looked_again = looks.acquire(timeout=5.0)
        new = meeting._opened(file)
        new.set("which", "new")
        assert finding.result(20.0).get("which") == b"new"
        assert looked_again


@pytest.mark.extended
@pytest.mark.parametrize("comes", [False, True], ids=["never comes", "hangs once he has come"])
def test_nobody_waits_for_ever_for_a_rank_at_the_meeting(tmp_path: Path, comes: bool) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir(mode=0o700)
    layout.config.write_text(run_of(steps=1, ranks=2, rank_patience_s=3).model_dump_json())
    words = "rolloutmq.launch.cli", "trainer", "--run-dir", layout.root
    with process(*words, log=tmp_path / "said") as first:
        if comes:
            store = meeting._found(layout.ranks, PATIENCE_S)
            store.set("here/1", "")
        assert first.wait(PATIENCE_S) == MISSED_FELLOW
    who = "another rank" if comes else "rank 1"
    assert f"error: {who} of the trainer did not respond within 3 s" in (tmp_path / "said").read_text()


def test_a_meeting_that_nobody_opens_is_given_up(tmp_path: Path) -> None:
    with (
        pytest.raises(RankSilentError, match="rank 0 of the trainer did not respond"),
        met(tmp_path / "f", 1, 2, 0.1),
    ):
        raise AssertionError


def test_there_are_no_more_ranks_than_was_said(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"trainer\.ranks: must be above 1 for rank 1 \(got 1\)"),
        met(tmp_path / "f", 1, 1, 1.0),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match="ranks must be 1 with trainer"):
        config_of("float32", ranks=2, lora={"rank": 4})
