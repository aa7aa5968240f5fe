"""300 steps of verl's asynchronous trainer beside a run, with kills of a worker, the broker and the trainer."""

import logging
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.integrations.verl.played import SIZE
from tests.trainer.integrations.verl.support import (
    command,
    end,
    environment,
    family_of,
    missing,
    ray_files,
    read,
    verify,
)
from tests.trainer.integrations.verl.test_training import BATCH, checked

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.schemas.files import RunLayout

pytestmark = [pytest.mark.rival, pytest.mark.extended, pytest.mark.skipif(bool(missing()), reason=missing())]

STEPS = 300
SAVED = 25
WITHIN_S = 540.0
RUN = f"""
[run]
name = "verl-played"

[environment.mine]
entry = "{Path(__file__).with_name("played.py")}:Played"
tasks = "submitted"
group_size = {SIZE}
min_workers = 2
max_workers = 2
pacing = false
stale = "pass"

[inference]
kind = "none"

[trainer]
enabled = false
batch_sequences = {BATCH * SIZE}
"""


def test_a_long_run_with_kills_of_everything_loses_no_group(run_dir: Path) -> None:
    """300 steps; a worker, the broker twice and the trainer are killed. Every group that counts was trained on once."""
    config, record, output = (run_dir.parent / name for name in ("run.toml", "record.jsonl", "player.log"))
    config.write_text(RUN)
    plan: dict[str, Any] = {
        "batch": BATCH,
        "rows": STEPS * BATCH + 200,
        "steps": STEPS,
        "mode": "colocate_async",
    }

    @contextmanager
    def life() -> Iterator[subprocess.Popen[bytes]]:
        """A life of the trainer; it and Ray's processes are killed at the end of the block."""
        with ray_files() as folder, output.open("ab") as log:
            words = command(run_dir, record, save_freq=SAVED, ray=folder, **plan)
            player = subprocess.Popen(
                words, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            try:
                yield player
            finally:
                family = family_of(player.pid)
                player.kill()
                player.wait(60)
                end(family)

    def train(live: LiveRun) -> None:
        live.wait_for("address of the broker", RunLayout(run_dir).endpoints.exists)

        def reached(step: int, player: subprocess.Popen[bytes]) -> None:
            def there() -> bool:
                assert player.poll() is None, output.read_text()[-6000:]
                return max(steps_of(record), default=0) >= step

            live.wait_for(f"step {step}", there)

        with life() as first:
            reached(60, first)
            live.kill("mine-0", signal.SIGKILL)
            reached(110, first)
            live.kill("broker", signal.SIGKILL)
            reached(160, first)
        with life() as second:
            reached(200, second)
            live.kill("mine-1", signal.SIGKILL)
            reached(240, second)
            live.kill("broker", signal.SIGKILL)
            live.wait_for("end of the trainer", lambda: second.poll() is not None)
            assert second.returncode == 0, output.read_text()[-6000:]
        live.process.send_signal(signal.SIGINT)

    _, summary = scenario.run(run_dir, config=config, fault=train, deadline_s=WITHIN_S)
    steps = [line["step"] for line in read(record) if "step" in line]
    again = next(at for at, (one, two) in enumerate(pairwise(steps)) if two["step"] <= one["step"])
    first, second = steps[: again + 1], steps[again + 1 :]
    resumed = second[0]["step"] - 1
    assert resumed >= 150
    assert resumed % SAVED == 0
    assert [one["step"] for one in first] == list(range(1, first[-1]["step"] + 1))
    assert [one["step"] for one in second] == list(range(resumed + 1, STEPS + 1))
    rows = checked(first[:resumed] + second)
    assert len({*rows}) == len(rows) == STEPS * BATCH, "no prompt is trained on twice"
    lost = {*checked(first[resumed:])} - {*rows}
    assert not lost, "what the lost steps had learned from was trained on again"
    assert summary["groups_trained"] == STEPS * BATCH
    assert summary["groups_lost"] == 0
    verify(run_dir)
    logging.getLogger(__name__).info("summary=%s", summary)


def steps_of(record: Path) -> list[int]:
    """Return the steps in the record; the last line may be half written."""
    text = record.read_text() if record.exists() else ""
    return [
        int(line.split('"step": ', 2)[2].split(",")[0])
        for line in text.splitlines()
        if line.startswith('{"step"')
    ]
