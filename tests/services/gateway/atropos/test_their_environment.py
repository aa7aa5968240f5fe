"""An environment of Atropos, unchanged, and either server between it and its example trainer or a trainer on the bus.

Everything of theirs has its defaults; W&B is on, and offline.
What the environment was answered 200 for reaches the trainer exactly once. With the gateway that holds although it and
the broker are killed while they work; the environment, which gives up when three requests in a row fail, lives on.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

import pytest
from tests.services.gateway.atropos import inference, servers
from tests.services.gateway.atropos.bodies import NO_LABEL
from tests.services.gateway.atropos.servers import (
    PYTHON,
    Api,
    ended,
    our_server,
    part,
    their_server,
    wait_for,
)

from benchmarks.queues import atropos

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(bool(atropos.missing()), reason=atropos.missing()),
]

HERE: Final = Path(__file__).parent
GROUP: Final = 4
BATCH: Final = 32
STEPS: Final = 60
"""The environment ends when so many batches are trained or queued: hundreds of groups."""
MOST: Final = 0.5
"""Of what that takes, the environment was answered 200 for so much at least: the rest it gave up by itself, for it
cancels what it is about when enough is queued."""
FILLER: Final = 0
"""The number of groups that are posted at the end to make the last batch full."""
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONPATH": ""}
"""W&B is on, as it is by default, and writes to its folder instead of sending."""


class Play:
    """An environment, a trainer and an inference server, while they run."""

    def __init__(self, where: Path, environment: "Popen[bytes]", trainer: "Popen[bytes]") -> None:
        self.where = where
        self.environment = environment
        self.trainer = trainer

    def fetched(self) -> list[dict[str, Any]]:
        """Every group that the trainer got."""
        return [group for line in _lines(self.where / "fetched") for group in line.get("batch") or ()]

    def batches(self) -> int:
        """How many batches the trainer got."""
        return sum(bool(line.get("batch")) for line in _lines(self.where / "fetched"))

    def answered(self, status: int = 200) -> Counter[int]:
        """How often each group was answered so."""
        lines = _lines(self.where / "posted")
        return Counter(
            number for line in lines if line.get("status") == status for number in line["answered"]
        )

    def wait_for_batches(self, count: int) -> None:
        """Wait until the trainer got so many more."""
        goal = self.batches() + count
        wait_for(lambda: self.batches() >= goal, self.trainer, f"batch {goal}")


def _lines(path: Path) -> list[Any]:
    """Return what was written down; the last line may be half written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@contextmanager
def playing(where: Path, url: str, on_bus: Path | None = None) -> Iterator[Play]:
    """Start the three; the trainer last, since an environment waits for it. `on_bus`: the run that it pulls from."""
    port = servers.free_port()
    here = "tests.services.gateway.atropos"
    environment = [
        *(str(PYTHON), str(HERE / "environment.py"), "serve"),
        *("--env.rollout_server_url", url, "--env.record", str(where / "posted")),
        *("--env.tokenizer_name", str(where / "tokenizer"), "--env.total_steps", str(STEPS)),
        *("--openai.base_url", f"http://127.0.0.1:{port}/v1"),
    ]
    trainer = [str(PYTHON), str(HERE / "trainer.py"), url]
    if on_bus is not None:
        trainer = [sys.executable, "-m", f"{here}.bus_trainer", str(on_bus)]
    trainer += [str(BATCH), str(where / "fetched")]
    with (
        ended([sys.executable, "-m", f"{here}.inference", str(port)], where / "inference.log"),
        ended(environment, where / "environment.log", OFFLINE | {"WANDB_DIR": str(where)}) as posting,
        ended(trainer, where / "trainer.log", OFFLINE if on_bus is None else None) as fetching,
    ):
        yield Play(where, posting, fetching)


def play(
    where: Path,
    url: str,
    trouble: Callable[[Play], None] = lambda _: None,
    on_bus: Path | None = None,
    again: int = 0,
) -> Counter[int]:
    """Play until the environment ends; return how often the trainer got each group that was answered 200.

    `again` batches may come twice: those whose last byte was on its way when the gateway was killed.
    """
    with playing(where, url, on_bus) as running:
        wait_for(running.batches, running.environment, "the first batch")
        trouble(running)
        wait_for(lambda: running.environment.poll() is not None, running.trainer, "the trainer")
        assert running.environment.returncode == 0, (where / "environment.log").read_text()[-3000:]
        promised = running.answered()
        fill(Api("ours", url), running.fetched()[-1]["env_id"])
        wait_for(
            lambda: promised.keys() <= _numbers(running.fetched()).keys(), running.trainer, "the trainer"
        )
        assert running.trainer.poll() is None
        fetched = running.fetched()
    for group in fetched:
        if group["tokens"][0][0] != FILLER:
            check(group)
    assert list(where.glob("wandb/offline-run-*")), "it is on by default"
    arrived = _numbers(fetched)
    twice = {number: times for number, times in arrived.items() if times > 1}
    assert len(twice) <= again * BATCH // GROUP, twice
    assert set(twice.values()) <= {2}, twice
    return promised


def _numbers(groups: list[dict[str, Any]]) -> Counter[int]:
    found = Counter(group["tokens"][0][0] for group in groups)
    del found[FILLER]
    return found


def fill(api: Api, env_id: int) -> None:
    """Make what the environment left of a batch a whole one."""
    row = [FILLER, 1]
    filler = {"tokens": [row] * GROUP, "masks": [row] * GROUP, "scores": [0.0] * GROUP, "env_id": env_id}
    filler["inference_logprobs"] = [[1.0, -1.0]] * GROUP
    for _ in range(BATCH // GROUP - 1):
        assert api.post("/scored_data", filler).status == 200


def check(group: dict[str, Any]) -> None:
    """A group is, value for value, what its number says."""
    number = group["tokens"][0][0]
    rows = [inference.answer(number, row) for row in range(GROUP)]
    assert group["tokens"] == [[number, *row] for row in rows]
    assert group["masks"] == [[NO_LABEL, *row] for row in rows]
    assert group["scores"] == [row / GROUP for row in range(GROUP)]
    assert group["inference_logprobs"] == [[1.0, *map(inference.logprob, row)] for row in rows]
    assert group["generation_params"] == {"n": number}
    assert [len(said) for said in group["messages"]] == [2] * GROUP
    absent = ("advantages", "ref_logprobs", "overrides", "group_overrides", "images", "distill_token_ids")
    assert {group[name] for name in absent} == {None}


def test_theirs_brings_everything(tmp_path: Path) -> None:
    with their_server() as url:
        assert len(play(tmp_path, url)) >= MOST * STEPS * BATCH / GROUP


def test_ours_brings_everything_though_it_is_killed(tmp_path: Path) -> None:
    with our_server(tmp_path / "run") as (url, launcher):

        def kill(running: Play) -> None:
            for name in ("serve-gateway", "broker", "serve-gateway"):
                running.wait_for_batches(STEPS // 6)
                part(launcher.pid, name).kill()

        assert len(play(tmp_path, url, kill, again=2)) >= MOST * STEPS * BATCH / GROUP


def test_ours_brings_everything_to_a_trainer_on_the_bus(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with our_server(run_dir) as (url, launcher):

        def kill(running: Play) -> None:
            for name in ("serve-gateway", "broker"):
                running.wait_for_batches(STEPS // 6)
                part(launcher.pid, name).kill()

        assert len(play(tmp_path, url, kill, run_dir)) >= MOST * STEPS * BATCH / GROUP
