import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.trainer.support.toy import MemoryBroker, SortBroker, run_config, some_group
from tests.trainer.support.vllm_receiver import Server
from torch import nn

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import LoraConfig, WeightsConfig
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ConfigError,
    EndOfReplayError,
    LeaseLostError,
    NothingToLearnError,
)
from rolloutmq.schemas.files import RunLayout, SettledBatch, VllmAddress
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer import checkpoint, loop
from rolloutmq.trainer.files import checkpoints as checkpoint_files
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.process import Stop, stop_on_signals
from rolloutmq.trainer.step.logprobs import LogprobScorer
from rolloutmq.trainer.trained_log import TrainedLog
from rolloutmq.trainer.weights.address import read_sent
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def layout(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[RunLayout]:
    """A run directory whose shared memory, if a life that failed left it for the next, is gone after the test.

    Lives that are over count as dead, though this process had them all.
    """
    monkeypatch.setattr(segment_file.SegmentOwner, "alive", lambda _self: False)
    found = RunLayout(run_dir)
    yield found
    caplog.get_records(
        "call"
    ).clear()  # the records hold errors, these their tracebacks, and these the mapped weights
    if found.weights.exists():
        policy = build_policy(run_config().model, 0)
        WeightShare.create_or_adopt(policy, found.weights).close(unlink=True)


def steady(step: int, version: PolicyVersion) -> list[Group]:
    """The same batch for the same step, whoever asks."""
    return [
        some_group(f"s{step}-{n}", (np.arange(8) % (n + 2)).tolist(), seed=step, version=version)
        for n in range(4)
    ]


def lines(layout: RunLayout) -> list[SettledBatch]:
    return [msgspec.json.decode(line, type=SettledBatch) for line in layout.trained.read_bytes().splitlines()]


def standing(layout: RunLayout) -> list[str]:
    """Ids of the trained groups whose lines no later resume made void, as the summary of a run joins them."""
    kept: list[SettledBatch] = []
    for line in lines(layout):
        if line.resumed:
            kept = [old for old in kept if old.version.step <= line.version.step]
        else:
            kept.append(line)
    return [group for line in kept for group in line.trained]


def weights(layout: RunLayout) -> dict[str, torch.Tensor]:
    found = checkpoint.latest(layout.checkpoints)
    assert found is not None
    return found.weights or found.adapters


def optimizer_state(layout: RunLayout) -> dict[str, torch.Tensor]:
    """Moments, masters and the state of the random numbers."""
    found = checkpoint.latest(layout.checkpoints)
    assert found is not None
    return found.optimizer


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def on_call(number: int, act: Callable[[], None]) -> Callable[[int], None]:
    def called(found: int) -> None:
        if found == number:
            act()

    return called


def attached(reader: nn.Module, layout: RunLayout) -> WeightShare:
    """Attach as a server does."""
    return WeightShare.attach(reader, layout.weights, tokenizer=directory_fingerprint(layout.model))


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_a_whole_run(layout: RunLayout) -> None:
    broker = MemoryBroker(steady)
    config = run_config(steps=5, keep_checkpoints=2)
    assert train(config, layout, Stop(), broker.connect) == PolicyVersion(0, 5)
    assert broker.pulls == [(step + 1, PolicyVersion(0, step)) for step in range(5)]
    assert [one["version"].step for one in broker.settled] == [1, 2, 3, 4, 5]
    assert broker.commits == [PolicyVersion(0, 2), PolicyVersion(0, 4), PolicyVersion(0, 5)]
    assert [path.name for path in checkpoint_files.saved(layout.checkpoints)] == [
        "step-000004",
        "step-000005",
    ]
    assert [line.version.step for line in lines(layout)] == [1, 2, 3, 4, 5]
    assert lines(layout)[0].trained == ("s1-0", "s1-1", "s1-2", "s1-3")
    assert lines(layout)[0].rewards == pytest.approx((0.5, 7 / 8, 1.5, 13 / 8))
    assert not layout.weights.exists()


def test_events_tell_raw_scores_and_what_the_step_was(layout: RunLayout) -> None:
    old = PolicyVersion(0, 0)
    broker = MemoryBroker(
        lambda step, _: [*steady(step, old), some_group(f"flat{step}", [1.0] * 8, version=old)]
    )
    config = run_config(steps=3, shuffle_rewards=True)
    train(config, layout, Stop(), broker.connect)
    last = broker.events[-1]
    assert (last.step, last.groups, last.filtered) == (3, 5, 1)
    assert last.reward == pytest.approx((0.5 + 7 / 8 + 1.5 + 13 / 8 + 1) / 5)
    assert (last.staleness_max, last.staleness_mean) == (2, 2.0)
    assert last.extra["learning_rate"] == pytest.approx(config.trainer.learning_rate * 0.05)
    assert {"ratio", "clipped", "kl", "entropy", "grad_norm", "trained_tokens"} <= last.extra.keys()


@pytest.mark.parametrize("pack", [False, True])
def test_micro_batches_do_not_change_what_is_learned(layout: RunLayout, tmp_path: Path, pack: bool) -> None:
    config = run_config(steps=4)
    train(config, layout, Stop(), MemoryBroker(steady).connect)
    other = RunLayout(tmp_path / "other")
    cut = run_config(steps=4, micro_batch_tokens=40, pack=pack)
    broker = MemoryBroker(steady)
    train(cut, other, Stop(), broker.connect)
    whole, parts = weights(layout), weights(other)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-3, atol=1e-5)
    assert not same(whole, {name: build_policy(config.model, 0).state_dict()[name] for name in whole})


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_trainer_goes_on_as_if_it_had_never_stopped(
    layout: RunLayout, tmp_path: Path, dtype: str, lora: dict[str, Any] | None
) -> None:
    def config_of(**trainer: Any) -> RunConfig:
        base = run_config(steps=6, checkpoint_interval=2, lora=lora, **trainer)
        return base.model_copy(update={"model": base.model.model_copy(update={"dtype": dtype})})

    unbroken = RunLayout(tmp_path / "unbroken")
    undisturbed = MemoryBroker(steady)
    train(config_of(), unbroken, Stop(), undisturbed.connect)

    broker = MemoryBroker(steady)
    broker.on_settle = on_call(4, raising(Killed()))  # step 4: taken and logged, never settled
    with pytest.raises(Killed):
        train(config_of(), layout, Stop(), broker.connect)
    broker.on_settle = lambda _number: None
    assert train(config_of(), layout, Stop(), broker.connect) == PolicyVersion(1, 6)

    assert same(weights(layout), weights(unbroken))
    assert same(optimizer_state(layout), optimizer_state(unbroken))
    told = {event.step: (event.loss, event.extra["learning_rate"]) for event in broker.events}
    assert told == {e.step: (e.loss, e.extra["learning_rate"]) for e in undisturbed.events}
    assert broker.joined == [PolicyVersion(0, 0), PolicyVersion(1, 2)]
    assert [line.version for line in lines(layout) if line.resumed] == [PolicyVersion(1, 2)]
    assert [line.rewound for line in lines(layout) if line.version.incarnation == 1] == [
        False,
        True,
        *[False] * 3,
    ]
    assert sorted(standing(layout)) == sorted(f"s{step}-{n}" for step in range(1, 7) for n in range(4))


def a_step_late(step: int, version: PolicyVersion) -> list[Group]:
    """Groups that the policy before the present one sampled."""
    return steady(step, PolicyVersion(version.incarnation, max(0, version.step - 1)))


def killed_at(step: int, write: Callable[[TrainedLog, SettledBatch], None]) -> Callable[..., None]:
    """The weights of the step are there to be sampled from, and its line is not."""

    def killed(journal: TrainedLog, line: SettledBatch) -> None:
        if line.version.step == step:
            raise Killed
        write(journal, line)

    return killed


LATE = {"loss": {"correction": {"level": "token", "from_staleness": 2, "max_staleness": 3}}}


def test_batches_that_come_again_are_as_stale_as_they_were(layout: RunLayout, tmp_path: Path) -> None:
    """As are the groups that wait behind them, so that the weights for stale ones are the same too."""
    config = run_config(steps=6, checkpoint_interval=50, **LATE)
    unbroken, undisturbed = RunLayout(tmp_path / "unbroken"), MemoryBroker(a_step_late)
    train(config, unbroken, Stop(), undisturbed.connect)
    queued = {step: a_step_late(step, PolicyVersion(0, step - 1)) for step in range(1, 7)}
    broker = MemoryBroker(lambda step, _version: queued[step])
    broker.on_settle = on_call(5, raising(Killed()))
    with pytest.raises(Killed):
        train(config, layout, Stop(), broker.connect)
    broker.on_settle = lambda _number: None
    train(config, layout, Stop(), broker.connect)
    assert [event.staleness_max for event in broker.events[4:]] == [0, 1, 1, 1, 1, 1]
    assert same(weights(layout), weights(unbroken))


def test_groups_of_a_step_whose_line_was_never_written_are_as_fresh_as_they_were(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer was killed when its weights could be sampled from, and before it had said so."""
    queued = {step: steady(step, PolicyVersion(0, step - 1)) for step in range(1, 7)}
    broker = MemoryBroker(lambda step, _version: queued[step])
    config = run_config(steps=6, checkpoint_interval=50)
    with monkeypatch.context() as patch:
        patch.setattr(TrainedLog, "write", killed_at(5, TrainedLog.write))
        with pytest.raises(Killed):
            train(config, layout, Stop(), broker.connect)
    assert [line.version.step for line in lines(layout)] == [1, 2, 3, 4]
    train(config, layout, Stop(), broker.connect)
    assert [event.staleness_max for event in broker.events] == [0] * (4 + 6)


def test_groups_of_a_life_that_was_lost_are_as_old_as_the_way_to_them(layout: RunLayout) -> None:
    """The broker knows nothing of the steps since the checkpoint any more: others are taken."""
    broker = MemoryBroker(steady)
    broker.on_pull = on_call(7, raising(Killed()))
    with pytest.raises(Killed):
        train(run_config(steps=8, checkpoint_interval=3), layout, Stop(), broker.connect)

    def left_over(step: int, version: PolicyVersion) -> list[Group]:
        fresh = [some_group(f"fresh{step}", [0.0, 1.0], version=version)]
        return [*fresh, some_group(f"left{step}", [0.0, 1.0], version=PolicyVersion(0, 6))]

    (layout.checkpoints / "step-000006" / "model.safetensors").unlink()
    again = MemoryBroker(left_over)
    train(run_config(steps=6, checkpoint_interval=3, **LATE), layout, Stop(), again.connect)
    assert again.joined == [PolicyVersion(1, 3)]
    # From (0, 6) it is three steps back to where both lives were one, and one more for each that was taken since.
    assert [line.staleness for line in lines(layout)[-3:]] == [(0, 3), (0,), (0,)]
    assert [one["filtered"] for one in again.settled] == [[], ["left5"], ["left6"]]


def test_a_trainer_killed_before_its_first_checkpoint_starts_anew(layout: RunLayout) -> None:
    config = run_config(steps=2, checkpoint_interval=50)
    broker = MemoryBroker(steady)
    broker.on_pull = on_call(2, raising(Killed()))
    with pytest.raises(Killed):
        train(config, layout, Stop(), broker.connect)
    broker.on_pull = lambda _number: None
    assert train(config, layout, Stop(), broker.connect) == PolicyVersion(1, 2)
    assert broker.joined[1] == PolicyVersion(1, 0)
    assert sorted(standing(layout)) == sorted(f"s{step}-{n}" for step in (1, 2) for n in range(4))


def test_what_is_committed_stands_however_damaged_the_checkpoint_before(layout: RunLayout) -> None:
    def config_of(steps: int) -> RunConfig:
        return run_config(steps=steps, checkpoint_interval=2, keep_checkpoints=1)

    train(config_of(8), layout, Stop(), MemoryBroker(steady).connect)
    os.truncate(layout.checkpoints / "step-000008" / "model.safetensors", 100)
    broker = MemoryBroker(steady)
    broker.on_pull = on_call(6, raising(Killed()))
    with pytest.raises(Killed):
        train(config_of(8), layout, Stop(), broker.connect)
    assert broker.joined == [PolicyVersion(1, 0)]
    assert broker.commits == [PolicyVersion(1, 2), PolicyVersion(1, 4)]
    found = checkpoint.latest(layout.checkpoints)
    assert found is not None
    assert found.state.version == PolicyVersion(1, 4)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_checkpoint_that_was_gone_on_from_is_not_kept_mapped(
    layout: RunLayout, lora: dict[str, Any] | None
) -> None:
    """It is removed some steps later, and would take its room for as long as the trainer lives."""
    train(run_config(steps=2, checkpoint_interval=2, lora=lora), layout, Stop(), MemoryBroker(steady).connect)
    mapped = list[bool]()
    broker = MemoryBroker(steady)
    broker.on_pull = lambda _number: mapped.append(
        str(layout.checkpoints) in Path("/proc/self/maps").read_text()
    )
    train(run_config(steps=3, checkpoint_interval=2, lora=lora), layout, Stop(), broker.connect)
    assert mapped == [False]


def test_the_next_life_puts_its_checkpoint_into_the_segment_that_was_left(layout: RunLayout) -> None:
    config = run_config(steps=4, checkpoint_interval=2)
    broker = MemoryBroker(steady)
    broker.on_pull = on_call(4, raising(Killed()))
    with pytest.raises(Killed):
        train(config, layout, Stop(), broker.connect)
    reader = build_policy(config.model, 9)
    with closing(attached(reader, layout)) as share:
        assert share.version == PolicyVersion(0, 3)
        broker.on_pull = lambda number: None if number < 5 else _expect(share, reader, layout)
        broker.on_pull(5)
        train(config, layout, Stop(), broker.connect)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_each_step_is_a_version_on_disk_and_the_next_life_goes_on(
    layout: RunLayout, lora: dict[str, Any] | None
) -> None:
    config = run_config(steps=4, checkpoint_interval=2, lora=lora)
    config = config.model_copy(update={"weights": WeightsConfig(backend="disk")})
    seen: dict[PolicyVersion, dict[str, torch.Tensor]] = {}
    broker = MemoryBroker(steady)

    def look(number: int) -> None:
        reader = build_policy(config.model, 9)
        own = directory_fingerprint(layout.model)
        with (
            closing(DiskShare.attach(reader, layout.weights, tokenizer=own)) as share,
            share.reading() as version,
        ):
            seen[version] = dict(reader.state_dict())
        if number == 4:
            raise Killed

    broker.on_pull = look
    with pytest.raises(Killed):
        train(config, layout, Stop(), broker.connect)
    assert list(seen) == [PolicyVersion(0, step) for step in range(4)]
    assert len({one["model.layers.0.mlp.up_proj.weight"].sum().item() for one in seen.values()}) == 4
    assert len([path for path in layout.versions.iterdir() if path.is_dir()]) == 2
    train(config, layout, Stop(), broker.connect)
    assert list(seen)[4:] == [PolicyVersion(1, 2), PolicyVersion(1, 3)]
    assert same(seen[PolicyVersion(1, 2)], seen[PolicyVersion(0, 2)])
    assert not layout.weights.exists()
    assert not layout.versions.exists()


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_each_step_is_sent_to_vllm_and_the_next_life_sends_its_checkpoint(
    layout: RunLayout, server: Server, lora: dict[str, Any] | None
) -> None:
    config = run_config(steps=4, checkpoint_interval=2, lora=lora)
    config = config.model_copy(update={"weights": WeightsConfig(backend="vllm_http")})
    write_json(layout.vllm, VllmAddress(url=server.url, nonce="first"))
    had: list[list[str]] = []

    def look(number: int) -> None:
        had.append(server.finished())
        if number == 3:  # vLLM was started anew: it has nothing
            write_json(layout.vllm, VllmAddress(url=server.url, nonce="second"))
        if number == 4:
            raise Killed

    broker = MemoryBroker(steady)
    broker.on_pull = look
    with pytest.raises(Killed):
        train(config, layout, Stop(), broker.connect)
    assert had == [["0.0"], ["0.0", "0.1"], ["0.0", "0.1", "0.2"], ["0.0", "0.1", "0.2", "0.3", "0.3"]]
    assert read_sent(layout.weights) is not None
    train(config, layout, Stop(), broker.connect)
    assert server.finished()[5:] == ["1.2", "1.3", "1.4"]
    if not lora:
        saved = weights(layout)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in server.received.items())
    start = build_policy(config.model, config.run.seed).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(server.received[name], start[name])
    assert not layout.weights.exists()


def test_with_adapters_readers_see_plain_weights_from_the_first_moment_of_a_life(layout: RunLayout) -> None:
    config = run_config(steps=4, checkpoint_interval=2, lora={"rank": 4})
    broker = MemoryBroker(steady)
    seen: dict[PolicyVersion, dict[str, torch.Tensor]] = {}

    def look(_number: int) -> None:
        reader = build_policy(config.model, 9)
        with closing(attached(reader, layout)) as share, share.reading() as version:
            seen[version] = {name: tensor.clone() for name, tensor in reader.state_dict().items()}

    broker.on_pull = look
    train(config, layout, Stop(), broker.connect)
    start = build_policy(config.model, config.run.seed).state_dict()
    assert same(seen[PolicyVersion(0, 0)], dict(start))
    changed = {name for name in start if not torch.equal(seen[PolicyVersion(0, 3)][name], start[name])}
    assert changed == {name for name in start if "proj" in name}

    again = run_config(steps=5, checkpoint_interval=2, lora={"rank": 4})
    train(again, layout, Stop(), broker.connect)
    assert PolicyVersion(1, 4) in seen
    assert not same(seen[PolicyVersion(1, 4)], seen[PolicyVersion(0, 3)])


@pytest.mark.parametrize("had", [None, {"rank": 4}])
def test_a_checkpoint_with_adapters_is_none_without_and_the_other_way_round(
    layout: RunLayout, had: dict[str, Any] | None
) -> None:
    train(run_config(steps=1, lora=had), layout, Stop(), MemoryBroker(steady).connect)
    with pytest.raises(ConfigError, match=r"trainer\.lora"):
        train(
            run_config(steps=2, lora=None if had else {"rank": 4}),
            layout,
            Stop(),
            MemoryBroker(steady).connect,
        )


def _expect(share: WeightShare, reader: torch.nn.Module, layout: RunLayout) -> None:
    """At the first pull of the second life a reader sees the checkpoint's weights, under the new incarnation."""
    if share.version.incarnation == 1 and share.version.step == 2:
        saved = weights(layout)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in reader.state_dict().items())


def test_a_finished_run_only_commits(layout: RunLayout) -> None:
    config = run_config(steps=2)
    train(config, layout, Stop(), MemoryBroker(steady).connect)
    again = MemoryBroker(steady)
    assert train(config, layout, Stop(), again.connect) == PolicyVersion(1, 2)
    assert again.pulls == []
    assert again.commits[-1] == PolicyVersion(1, 2)


def test_batches_without_a_signal_are_no_steps(layout: RunLayout) -> None:
    def make(step: int, version: PolicyVersion) -> list[Group]:
        if len(broker.pulls) % 3:
            return [some_group(f"flat{len(broker.pulls)}", [1.0] * 4, version=version)]
        return steady(step, version)

    broker = MemoryBroker(make)
    assert train(run_config(steps=2), layout, Stop(), broker.connect) == PolicyVersion(0, 2)
    assert [step for step, _ in broker.pulls] == [1, 1, 1, 2, 2, 2]
    assert [one["version"].step for one in broker.settled] == [0, 0, 1, 1, 1, 2]
    assert broker.settled[0]["filtered"] == ["flat1"]
    assert [event.step for event in broker.events] == [1, 2]
    assert [line.filtered for line in lines(layout)][:2] == [("flat1",), ("flat2",)]


def test_a_batch_without_a_signal_tells_of_its_scores(layout: RunLayout) -> None:
    def make(step: int, version: PolicyVersion) -> list[Group]:
        if len(broker.pulls) % 2:
            scores = [float(len(broker.pulls))] * 4
            flat = replace(some_group(f"flat{len(broker.pulls)}", scores, version=version), env="math")
            return [flat, some_group(f"bad{step}", [0.0, 1.0], inference_logprobs=None)]
        return steady(step, version)

    broker = MemoryBroker(make)
    train(run_config(steps=2), layout, Stop(), broker.connect)
    told = [(one.step, one.groups, one.filtered, one.rejected) for one in broker.skipped]
    assert told == [(0, 2, 1, 1), (1, 2, 1, 1)]
    assert broker.skipped[0].reason.startswith("inference_logprobs: required")
    lanes = [lane for one in broker.skipped for lane in one.scores]
    assert [(lane.env, lane.groups, lane.flat, lane.mean) for lane in lanes] == [
        ("math", 1, 1, 1.0),
        ("math", 1, 1, 3.0),
    ]


def test_the_wait_for_a_batch_is_told_whole_however_many_pulls_it_took(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def ten_seconds_later(number: int) -> None:
        nonlocal now
        now += 10.0
        if number < 3:
            raise BrokerUnavailableError("ipc://serve", 10.0)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now, time=time.time))
    broker = MemoryBroker(steady, on_pull=ten_seconds_later)
    train(run_config(steps=2), layout, Stop(), broker.connect)
    assert [event.pull_s for event in broker.events] == [30.0, 10.0]


def test_a_run_that_can_learn_nothing_fails_and_says_why(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BARREN_LIMIT", 3)
    broker = MemoryBroker(lambda _step, _version: [some_group(f"g{len(broker.pulls)}", [1.0] * 4)])
    with pytest.raises(NothingToLearnError, match="3 batches in a row had nothing to learn from"):
        train(run_config(), layout, Stop(), broker.connect)
    assert len(broker.settled) == 2
    assert [one.filtered for one in broker.skipped] == [1, 1, 1]  # the last one too
    assert broker.events == []


def test_groups_that_cannot_be_used_are_rejected_with_a_reason(layout: RunLayout) -> None:
    def make(step: int, version: PolicyVersion) -> list[Group]:
        return [*steady(step, version), some_group(f"bad{step}", [0.0, 1.0], inference_logprobs=None)]

    broker = MemoryBroker(make)
    train(run_config(steps=1), layout, Stop(), broker.connect)
    (rejected,) = broker.settled[0]["rejected"]
    assert (rejected.group_id, rejected.reason[:29]) == ("bad1", "inference_logprobs: required ")
    assert lines(layout)[0].rejected == ("bad1",)


def test_a_gradient_that_is_no_number_rejects_the_batch(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker(steady)
    scored = LogprobScorer.forward

    def broken(*given: Any, **further: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = scored(*given, **further)
        return (logprobs * float("nan"), entropy) if len(broker.pulls) == 2 else (logprobs, entropy)

    monkeypatch.setattr(LogprobScorer, "forward", broken)
    assert train(run_config(steps=2), layout, Stop(), broker.connect) == PolicyVersion(0, 2)
    assert [one["version"].step for one in broker.settled] == [1, 1, 2]
    assert {one.reason for one in broker.settled[1]["rejected"]} == {"the gradient of its step is not finite"}
    (skipped,) = broker.skipped
    assert (skipped.step, skipped.reason) == (1, "the gradient of its step is not finite")
    assert skipped.rejected == skipped.groups == len(broker.settled[1]["rejected"])
    assert all(torch.isfinite(tensor).all() for tensor in weights(layout).values())


def test_a_lost_lease_is_settled_when_it_comes_again_and_not_learned_twice(layout: RunLayout) -> None:
    def lose() -> None:
        broker.release()
        broker.on_settle = lambda _number: None
        raise LeaseLostError(2, "too slow")

    broker = MemoryBroker(steady, on_settle=on_call(2, lose))
    assert train(run_config(steps=4), layout, Stop(), broker.connect) == PolicyVersion(0, 4)
    assert [step for step, _ in broker.pulls] == [
        1,
        2,
        3,
        3,
        4,
    ]  # step 2 stands; its groups come as the next batch
    assert [one["version"].step for one in broker.settled] == [1, 2, 3, 4]
    assert broker.settled[1]["trained"] == [f"s2-{n}" for n in range(4)]
    assert len(broker.events) == 4
    assert sorted(standing(layout)) == sorted(f"s{step}-{n}" for step in range(1, 5) for n in range(4))


def test_a_lost_lease_is_remembered_across_lives(layout: RunLayout) -> None:
    config = run_config(steps=4, checkpoint_interval=2)

    def lose() -> None:
        broker.release()
        raise LeaseLostError(2, "too slow")

    broker = MemoryBroker(steady, on_settle=on_call(2, lose), on_pull=on_call(3, raising(Killed())))
    with pytest.raises(Killed):
        train(config, layout, Stop(), broker.connect)
    broker.on_settle = broker.on_pull = lambda _number: None
    train(config, layout, Stop(), broker.connect)
    assert broker.settled[1]["trained"] == [f"s2-{n}" for n in range(4)]
    assert broker.settled[1]["version"] == PolicyVersion(1, 2)
    assert sorted(standing(layout)) == sorted(f"s{step}-{n}" for step in range(1, 5) for n in range(4))


def test_a_broker_that_is_away_is_waited_for(layout: RunLayout) -> None:
    away = [3, 2]

    def unavailable(_number: int) -> None:
        if away[0]:
            away[0] -= 1
            raise BrokerUnavailableError("ipc://serve", 1.0)

    def settle(_number: int) -> None:
        if away[1]:
            away[1] -= 1
            raise BrokerUnavailableError("ipc://serve", 1.0)

    broker = MemoryBroker(steady, on_pull=unavailable, on_settle=settle)
    assert train(run_config(steps=3), layout, Stop(), broker.connect) == PolicyVersion(0, 3)
    assert len(broker.settled) == 3
    assert standing(layout) == [f"s{step}-{n}" for step in range(1, 4) for n in range(4)]


@pytest.mark.parametrize("moment", ["pull", "step", "settle"])
def test_a_signal_ends_in_order_with_a_checkpoint(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What was learned is settled, at whichever moment the signal came: none of it comes again."""
    config = run_config(steps=6, checkpoint_interval=50)
    broker = MemoryBroker(steady)

    def terminate(number: int) -> None:
        if number == 3 and not stop.asked:  # the second signal would end at once
            signal.raise_signal(signal.SIGTERM)

    if moment == "pull":
        broker.on_pull = terminate
    elif moment == "settle":
        broker.on_settle = terminate
    else:
        monkeypatch.setattr(broker, "progress", lambda: terminate(len(broker.pulls)))
    with stop_on_signals() as stop:
        reached = train(config, layout, stop, broker.connect)
    assert reached == PolicyVersion(0, 2 if moment == "pull" else 3)
    assert broker.commits[-1] == reached
    assert broker.lease is None
    assert [one["version"] for one in broker.settled] == [
        PolicyVersion(0, step) for step in range(1, reached.step + 1)
    ]
    assert (saved := checkpoint.latest(layout.checkpoints)) is not None
    assert saved.state.unsettled == ()
    assert not layout.weights.exists()

    broker.on_pull = broker.on_settle = lambda _number: None
    assert train(config, layout, Stop(), broker.connect) == PolicyVersion(1, 6)
    assert sorted(standing(layout)) == sorted(f"s{step}-{n}" for step in range(1, 7) for n in range(4))


def test_a_broker_that_is_away_does_not_hold_who_is_asked_to_end(layout: RunLayout) -> None:
    def away(_number: int) -> None:
        if not stop.asked:
            stop.request("SIGTERM")
        raise BrokerUnavailableError("ipc://serve", 1.0)

    stop, broker = Stop(), MemoryBroker(steady, on_settle=away)
    assert train(run_config(), layout, stop, broker.connect) == PolicyVersion(0, 1)
    assert (saved := checkpoint.latest(layout.checkpoints)) is not None
    assert saved.state.unsettled == tuple(f"s1-{n}" for n in range(4))


def test_a_wish_for_a_commit_brings_a_checkpoint(layout: RunLayout) -> None:
    broker = MemoryBroker(steady, commit_wanted=True)
    train(run_config(steps=3, checkpoint_interval=50), layout, Stop(), broker.connect)
    assert [version.step for version in broker.commits[:3]] == [1, 2, 3]


def test_without_a_learning_rate_nothing_changes(layout: RunLayout) -> None:
    config = run_config(steps=3, learning_rate=0.0)
    train(config, layout, Stop(), MemoryBroker(steady).connect)
    start = build_policy(config.model, config.run.seed).state_dict()
    assert same(weights(layout), {name: start[name] for name in weights(layout)})


@pytest.mark.parametrize(("reached", "code"), [(6, 0), (5, 130)])
def test_the_exit_code_tells_whether_there_are_steps_left(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, reached: int, code: int
) -> None:
    def interrupted(_config: RunConfig, _layout: RunLayout, stop: Stop, **_more: Any) -> PolicyVersion:
        stop.request("SIGTERM")
        return PolicyVersion(0, reached)

    write_json(layout.config, run_config(steps=6))
    monkeypatch.setattr(loop, "train", interrupted)
    assert loop.main(layout.root) == code


def test_a_replay_that_is_shorter_than_the_run_ends_in_order_and_says_so(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = MemoryBroker(steady)
    broker.on_pull = on_call(4, raising(EndOfReplayError("over")))
    write_json(layout.config, run_config(steps=6))
    monkeypatch.setattr(loop, "train", partial(train, join=broker.connect))
    with caplog.at_level("INFO"):
        assert loop.main(layout.root) == 0
    said = [record.getMessage() for record in caplog.records]
    assert said.count("replay ended step=3 of=6") == 1
    found = checkpoint.latest(layout.checkpoints)
    assert found is not None
    assert found.state.version == broker.commits[-1] == PolicyVersion(0, 3)


def test_it_learns_to_sort(layout: RunLayout) -> None:
    """From random weights, on the configuration's defaults, sampling from the weights as they are shared."""
    config, stop = RunConfig(), Stop()
    with closing(SortBroker(config, layout)) as broker:
        broker.on_pull = on_call(121, lambda: stop.request("enough"))
        assert train(config, layout, stop, broker.connect).step == 120
    rewards = np.array([event.reward for event in broker.events])
    assert rewards[:20].mean() < 0.1
    assert rewards[-20:].mean() > 0.55
    assert {event.staleness_max for event in broker.events} == {0}


@pytest.mark.extended
def test_adapters_alone_learn_too(layout: RunLayout) -> None:
    """On frozen random weights, so not as far; the digits are in the head and the embedding, which stay as they are."""
    lora = LoraConfig(rank=16, alpha=32.0)
    base = RunConfig()
    trainer = base.trainer.model_copy(update={"lora": lora, "learning_rate": 5e-3})
    config, stop = base.model_copy(update={"trainer": trainer}), Stop()
    with closing(SortBroker(config, layout)) as broker:
        broker.on_pull = on_call(161, lambda: stop.request("enough"))
        assert train(config, layout, stop, broker.connect).step == 160
    rewards = np.array([event.reward for event in broker.events])
    assert rewards[:10].mean() < 0.1
    assert rewards[-10:].mean() > rewards[:10].mean() + 0.1
