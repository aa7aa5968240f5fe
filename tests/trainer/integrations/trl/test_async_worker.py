"""Groups of the bus through the data path of TRL's `AsyncGRPOTrainer`: exact, settled once taken, rewound by a resume.

`make test-trl` runs those in TRL's own environment. Its training needs a GPU and is not tested.
"""

import json
import subprocess
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.trainer.integrations.trl.support import (
    PYTHON,
    ROOT,
    SIZE,
    broker,
    config,
    environment,
    group,
    missing,
    push,
    settled,
    verify,
)

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected
from rolloutmq.trainer.integrations.trl.async_worker import LAG, SYNCS, BusRolloutWorker
from rolloutmq.trainer.integrations.trl.callback import STATE
from rolloutmq.trainer.integrations.trl.rows import Demand
from rolloutmq.trainer.step.collate import Bounds
from rolloutmq.trainer.trained_log import TrainedLog

PLAYER = ROOT / "tests/trainer/integrations/trl/async_player.py"


def play(run_dir: Path, passes: int, **plan: Any) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    record = run_dir.parent / "async.jsonl"
    spec = json.dumps({"run_dir": str(run_dir), "record": str(record), "passes": passes, **plan})
    ended = subprocess.run(
        [str(PYTHON), str(PLAYER), spec],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else {}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return told, lines, ended.stderr


@pytest.mark.rival
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_samples_are_exact_through_trls_queue_and_planner(run_dir: Path) -> None:
    groups = [group(number) for number in range(12)]
    with broker(run_dir) as layout:
        push(run_dir, groups)
        told, lines, error = play(run_dir, 6, save_at=6)
        assert told, error
        given = {tuple(one["input_ids"]): one for line in lines for one in line["samples"]}
        assert len(given) >= 12
        for one in groups:
            chosen = np.split(trained_tokens(one), np.cumsum(one.columns["tokens"].lengths[0])[:-1])
            scores = one.scores
            for row, (ids, mask) in enumerate(zip(one["tokens"], chosen, strict=True)):
                sample = given.get(tuple(ids.tolist()))
                if sample is None:
                    continue
                known = np.where(mask, one["inference_logprobs"][row], 0.0).astype(np.float32)
                assert sample["completion_mask"] == mask.astype(int).tolist()
                assert np.array_equal(np.array(sample["old_log_probs"], np.float32), known)
                wanted = (scores[row] - scores.mean()) / scores.std()
                assert sample["advantage"] == pytest.approx(wanted, rel=1e-5)
        for line in lines:  # what its loss is taken over
            terms = [
                value
                for one in line["samples"]
                for value, use in zip(one["old_log_probs"], one["completion_mask"], strict=True)
                if use
            ]
            assert line["terms"] == pytest.approx(terms)
        assert told["covered"] <= len(settled(layout))
    verify(run_dir)


@pytest.mark.rival
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_resumed_trainer_gets_what_its_checkpoint_does_not_cover(run_dir: Path) -> None:
    with broker(run_dir) as layout:
        push(run_dir, [group(number) for number in range(16)])
        told, _, error = play(run_dir, 8, save_at=8)
        assert told, error
        before = [line for line in settled(layout) if line.trained]
        covered = told["covered"]
        assert 0 < covered < len(before)
        later, lines, error = play(run_dir, 2, resume=covered)
        assert later, error
        again = next(line for line in settled(layout) if line.version.incarnation == 1 and line.trained)
        assert again.version.step == covered + 1
        assert (again.trained, again.rewound) == (before[covered].trained, True)
        assert lines
    verify(run_dir)


@pytest.mark.rival
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_groups_that_cannot_be_trained_on_end_it_and_stay_queued(run_dir: Path) -> None:
    with broker(run_dir, config(environment={})) as layout:
        push(run_dir, [group(number, inference_logprobs=None) for number in range(2)])
        told, _, error = play(run_dir, 1)
        assert not told
        assert "no group of the first batch can be trained on: inference_logprobs: required" in error
        assert settled(layout) == []
    assert "2 queued" in verify(run_dir)


@pytest.mark.rival
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"temperature": 0.7}, "temperatures: the group was sampled at 1, TRL scores at temperature=0.7"),
        ({"vocabulary": 4}, "tokens: "),
    ],
)
def test_groups_are_judged_by_the_trainers_own_temperature_and_model(
    run_dir: Path, plan: dict[str, Any], problem: str
) -> None:
    with broker(run_dir) as layout:
        push(run_dir, [group(number) for number in range(2)])
        told, _, error = play(run_dir, 1, **plan)
        assert not told
        assert f"no group of the first batch can be trained on: {problem}" in error
        assert settled(layout) == []


def test_batches_are_of_whole_groups() -> None:
    with pytest.raises(UsageError, match=r"sequences: must be a positive multiple of group_size 4 \(got 6\)"):
        BusRolloutWorker("runs/mine", sequences=6, group_size=SIZE)


@pytest.mark.parametrize("value", [0, -4, "8", 8.0, True, None])
@pytest.mark.parametrize("key", ["sequences", "group_size"])
def test_numbers_of_sequences_are_whole(key: str, value: Any) -> None:
    given: dict[str, Any] = {"sequences": 8, "group_size": SIZE, key: value}
    with pytest.raises(UsageError, match=rf"^{key}: must be a whole number above 0 \(got {value!r}\)"):
        BusRolloutWorker("runs/mine", **given)


def test_a_checkpoint_of_the_asynchronous_trainer_is_found(tmp_path: Path) -> None:
    assert BusRolloutWorker.last_checkpoint(tmp_path) is None
    for number, callback in ((10, "AsyncCallback"), (20, "BusCallback")):
        path = tmp_path / f"checkpoint-{number}"
        path.mkdir()
        states = {callback: {"args": {}, "attributes": {"bus_step": number}}}
        (path / STATE).write_text(json.dumps({"stateful_callbacks": states}))
    assert BusRolloutWorker.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_a_checkpoint_covers_what_was_taken_some_steps_before() -> None:
    worker = BusRolloutWorker("runs/mine", sequences=8, group_size=SIZE)
    assert worker.callback.state()["attributes"] == {"bus_step": 0}
    found = []
    for step in range(1, 8):
        worker._newest = step
        worker.stepped()
        found.append(worker.step_covered)
    assert found[LAG:] == [1, 2, 3, 4]


def test_a_sample_has_trls_version_of_its_weights() -> None:
    """TRL takes three batches before its first step, then steps twice within a batch."""
    worker = BusRolloutWorker("runs/mine", sequences=8, group_size=SIZE)
    assert worker.model_version(0) == 0

    def synced(step: int, model_version: int) -> None:
        worker._life, worker.resume_step = 0, step
        worker.update_model_version(model_version)

    for step, model_version in ((0, 1), (3, 2), (3, 3), (4, 4)):
        synced(step, model_version)
    assert [worker.model_version(step) for step in range(6)] == [1, 1, 1, 2, 4, 4]
    assert worker.model_version(-1) == 0
    synced(2, 1)  # another life, from a checkpoint
    assert [worker.model_version(step) for step in (1, 2, 9)] == [0, 1, 1]
    for step in range(3, 3 * SYNCS):
        synced(step, step)
    assert len(worker._synced) == SYNCS
    assert worker.model_version(3 * SYNCS) == 3 * SYNCS - 1


def test_a_life_begins_with_the_training_and_not_with_a_look_at_its_version(tmp_path: Path) -> None:
    worker = BusRolloutWorker("tcp://127.0.0.1:1", sequences=8, group_size=SIZE, output_dir=tmp_path)
    with pytest.raises(UsageError, match="rollout_worker: training has not begun; pass callbacks="):
        _ = worker.version
    worker.update_model_version(1)  # as TRL does when it loads a checkpoint
    assert list(tmp_path.iterdir()) == []
    for life in range(2):
        worker.begin(7, 1.0, Bounds(14, 128))
        assert worker.version == worker.version == PolicyVersion(life, 7)


def test_an_environment_whose_groups_expire_is_refused(run_dir: Path) -> None:
    mine = {"entry": "mine.py:Mine", "group_size": SIZE, "pacing": False}
    write_json(RunLayout(run_dir).config, config(environment={"mine": mine}))
    worker = BusRolloutWorker(run_dir, sequences=8, group_size=SIZE)
    with pytest.raises(ConfigError, match=r'environment\.mine\.stale: must be "pass" .* \(got "drop"\)'):
        worker.start()


def test_an_error_of_its_thread_is_told_to_the_trainer() -> None:
    worker = BusRolloutWorker("runs/mine", sequences=8, group_size=SIZE)
    worker.check_health(1.0)
    worker._error = UsageError("no group can be trained on")
    with pytest.raises(UsageError, match="no group can be trained on"):
        worker.check_health(1.0)


class Pulled:
    """A consumer that has pulled these batches of one group each; what it hands over is taken at once."""

    def __init__(self, worker: BusRolloutWorker, *groups: Any) -> None:
        self._worker, self._groups = worker, iter(groups)
        self.rejected: list[Rejected] = []

    def pull(self, *_given: Any, **_options: Any) -> Any:
        return SimpleNamespace(groups=[next(self._groups)], staleness=lambda: [0], rewound=False)

    def progress(self) -> None:
        self._worker.rollout_buffer.queue.clear()

    def settle(self, _batch: Any, *, rejected: list[Rejected], **_options: Any) -> None:
        self.rejected += rejected


def rounds(tmp_path: Path, *groups: Any) -> tuple[PolicyVersion, Pulled]:
    """Let a worker take batches of one group each; return the policy after them."""
    worker = BusRolloutWorker("runs/mine", sequences=SIZE, group_size=SIZE)
    pulled = Pulled(worker, *groups)
    worker._consumer, worker._sample = cast("Any", pulled), dict
    worker._demand = Demand(SIZE, 1.0, Bounds(14, 128))
    with closing(TrainedLog(tmp_path / "trained.jsonl")) as journal:
        version = PolicyVersion()
        for _ in groups:
            version = worker._round(version, journal)
    return version, pulled


def test_a_later_batch_without_a_usable_group_is_rejected_and_training_goes_on(tmp_path: Path) -> None:
    version, pulled = rounds(tmp_path, group(0), group(1, inference_logprobs=None), group(2))
    assert version == PolicyVersion(0, 2)
    [rejected] = pulled.rejected
    assert (rejected.group_id, rejected.reason[:18]) == (group(1).group_id, "inference_logprobs")


def test_a_first_batch_without_a_usable_group_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no group of the first batch can be trained on: inference_logprobs"):
        rounds(tmp_path, group(0, inference_logprobs=None))
