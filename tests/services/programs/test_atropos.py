"""An environment of Atropos as the workers of a run: 1, 4 and 1 of them by the law, while Atropos' trainer eats.

The environment, its client and the trainer's client are those of atroposlib, unchanged. One worker and the orchestrator
are killed meanwhile. What the environment was answered 200 for reaches the trainer exactly once.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.services.gateway.atropos.servers import PYTHON, ended, free_port
from tests.services.programs.run import ProgramRun, running

from benchmarks.queues import atropos

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(bool(atropos.missing()), reason=atropos.missing()),
]

HERE: Final = Path(__file__).parent
BATCH: Final = 32
FAST_S: Final = 0.2
"""Seconds of a step: 160 sequences a second, which is what about five workers make."""
SLOW_S: Final = 3.0
"""Eleven sequences a second, a part of what one worker makes."""
LAW_S: Final = 300.0
"""Longest wait for the law; a worker of Atropos takes a core for ten seconds before it is ready."""
CONFIG: Final = """
[run]
name = "atropos"
dir = "{folder}/run"

[environment.counting]
command = [
    "{python}", "{here}/atropos_environment.py", "serve",
    "--env.rollout_server_url", "{{gateway_url}}",
    "--env.group_size", "{{group_size}}",
    "--env.max_num_workers", "{{concurrency}}",
    "--env.max_batches_offpolicy", "{{enough_batches}}",
    "--env.total_steps", "1000000",
    "--env.record", "{folder}/posted/{{worker}}",
    "--env.tokenizer_name", "{folder}/tokenizers/{{worker}}",
    "--openai.base_url", "{{inference_url}}",
]
variables = {{ HF_HUB_OFFLINE = "1", WANDB_MODE = "disabled", PYTHONPATH = "" }}
group_size = 4
concurrency = 4
min_workers = 1
max_workers = 4
drain_quiet_s = 2.0

[gateway]
enabled = true
port = 0

[inference]
kind = "external"
url = "http://127.0.0.1:{port}/v1"

[trainer]
enabled = false
batch_sequences = 32

[orchestrator.scaling]
down_window_s = 8.0
confirm_down_s = 5.0
"""


class Play:
    """The run, and what its two ends wrote down."""

    def __init__(self, folder: Path, run: ProgramRun) -> None:
        self.folder = folder
        self.run = run

    def pace(self, step_s: float) -> None:
        """Let a step of the trainer take so long."""
        (self.folder / "pace").write_text(str(step_s))

    def fetched(self) -> Counter[int]:
        """Return how often each group arrived."""
        path = self.folder / "fetched"
        return Counter(map(int, path.read_text().split("\n")[:-1])) if path.exists() else Counter()

    def promised(self) -> set[int]:
        """Return the groups that were answered 200; the last line of a killed process may be half written."""
        lines = [
            line for file in (self.folder / "posted").iterdir() for line in file.read_text().split("\n")[:-1]
        ]
        answers = [json.loads(line) for line in lines]
        return {number for one in answers if one.get("status") == 200 for number in one["answered"]}


@contextmanager
def playing(folder: Path) -> Iterator[Play]:
    """Start the run, an inference server and the trainer."""
    port, config = free_port(), folder / "run.toml"
    (folder / "posted").mkdir()
    (folder / "pace").write_text(str(FAST_S))
    config.write_text(CONFIG.format(folder=folder, here=HERE, python=PYTHON, port=port))
    inference = [sys.executable, "-m", "tests.services.gateway.atropos.inference", str(port)]
    with ended(inference, folder / "inference.log"), running(config, folder / "run") as run:
        files = [str(folder / "fetched"), str(folder / "pace")]
        trainer = [str(PYTHON), str(HERE / "atropos_trainer.py"), run.url, str(BATCH), *files]
        with ended(trainer, folder / "trainer.log", {"PYTHONPATH": ""}):
            yield Play(folder, run)


@pytest.mark.timeout(1200)
def test_their_environment_follows_their_trainer(tmp_path: Path) -> None:
    with playing(tmp_path) as play:
        run = play.run
        run.wait(play.fetched, "the first batch", LAW_S)
        run.wait(lambda: len(run.ready()) == 4, "four workers", LAW_S)
        before = run.workers()
        os.kill(before["counting-1"], signal.SIGKILL)
        run.wait(
            lambda: run.workers().get("counting-1", 0) not in {0, before["counting-1"]}, "the restart", LAW_S
        )
        run.wait(lambda: len(run.ready()) == 4, "its registration", LAW_S)
        before, orchestrator = run.workers(), run.service("orchestrator")
        os.kill(orchestrator, signal.SIGKILL)
        run.wait(lambda: run.log("orchestrator").count("adopted name=") == 4, "the adoption", LAW_S)
        assert run.workers() == before
        play.pace(SLOW_S)
        run.wait(lambda: len(run.workers()) == 1, "one worker", LAW_S)
        play.pace(0.0)
        promised = play.promised()
        run.wait(lambda: promised <= play.fetched().keys(), "the last groups", LAW_S)
        assert max(play.fetched().values()) == 1
        assert len(promised) > 100
    assert "pinned" not in run.log("orchestrator"), "nobody but the law chose the numbers"
    assert run.log("gateway").count("program delivered everything") >= 3
    assert "step=SIGKILL" not in run.log("orchestrator")
