"""`rolloutmq ratings`: the journal's groups give the agreement that the workers saw."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq import ConfigError, Ensemble, Group, Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.commands.scores import agree
from rolloutmq.launch.commands.scores.agree import ratings
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.rewards.ratings import Ratings
from rolloutmq.services.worker.trajectory import Trajectory, group_of

GROUPS = 6
EVALUATED = 3


def noisy(_task: Any, answer: Any) -> float | None:
    return None if answer > 0.9 else answer + np.sin(50 * answer) / 5


def ensemble() -> Ensemble:
    return Ensemble(
        {"a": lambda _, answer: answer, "noisy": noisy, "bad": lambda _, answer: 1 - answer},
        on_finding=lambda _: None,
    )


async def sent(run_dir: Path) -> Ratings:
    """Send rated groups, and some without ratings; return the last ratings."""
    rng, rated = np.random.default_rng(1), ensemble()
    async with Producer.open(run_dir, env="math", producer="math-0") as producer:
        for number in range(GROUPS):
            found = await rated.rate(None, rng.random(8).tolist())
            blank = Trajectory(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -1.0])
            await producer.send(group_of(f"rated/{number}", found.apply([blank] * 8)))
            plain: dict[str, Any] = {"tokens": [[1, 2]], "mask": [[0, 1]], "scores": [1.0]}
            await producer.send(Group.build(f"plain/{number}", **plain))
            await producer.send(Group.build(f"own/{number}", **plain, ratings=[[1.0, 2.0]]))
        await producer.flush(60.0)
    return found


async def evaluated(run_dir: Path) -> None:
    """Send groups of an evaluation whose ratings no training group has."""
    found = await ensemble().rate(None, [0.5] * 8)
    blank = Trajectory(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -1.0])
    async with Producer.open(run_dir, env="math", producer="math-eval-0", split=Split.EVAL) as producer:
        for number in range(EVALUATED):
            await producer.send(group_of(f"eval/{number}", found.apply([blank] * 8)))
        await producer.flush(60.0)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Ratings]:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir(mode=0o700)
    config = validate({"environment": {"math": {"entry": "m.py:M"}}})
    write_json(layout.config, config)
    with running_broker(config, layout):
        asyncio.run(evaluated(layout.root))
        found = asyncio.run(sent(layout.root))
    return layout.root, found


def test_the_agreement_is_that_of_the_last_window(
    run: tuple[Path, Ratings], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, last = run
    assert ratings(run_dir, None, None, as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["alpha"] == pytest.approx(last.alpha.value, abs=1e-12)
    assert (found["env"], found["raters"], found["sequences"]) == ("math", ["a", "noisy", "bad"], 8 * GROUPS)
    assert found["evaluation_groups"] == EVALUATED
    assert found["missing"]["noisy"] > 0
    assert found["missing"]["a"] == 0
    without = found["alpha_without"]
    assert max(without, key=without.get) == "bad"
    assert len(found["most_disputed"]) == 5
    assert all(name.startswith("rated/") for name in found["most_disputed"])


def test_a_person_reads_a_table_by_another_metric(
    run: tuple[Path, Ratings], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, last = run
    assert ratings(run_dir, "math", "ordinal", as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("math: alpha ")
    assert f"{last.alpha.value:.4f}" not in lines[0]
    assert "(ordinal, scale none, 48 sequences)" in lines[0]
    assert lines[1] == f"  {EVALUATED} groups of evaluations left out"
    assert [line.split()[0] for line in lines[2:5]] == ["a", "noisy", "bad"]
    assert ratings(run_dir, "other", None, as_json=False) == 1
    assert "has ratings" in capsys.readouterr().err


@pytest.mark.parametrize(("metric", "kept"), [("interval", 5), ("ratio", 2)])
def test_a_large_journal_is_bounded_to_its_last_groups(
    metric: str,
    kept: int,
    run: tuple[Path, Ratings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ratio compares all pairs of ratings, so it takes fewer; the last group alone is never left out."""
    run_dir, _ = run
    monkeypatch.setattr(agree, "RATINGS_LIMIT", 5 * 8 * 3)
    monkeypatch.setattr(agree, "RATIO_LIMIT", 3 * 8 * 3 - 1)
    assert ratings(run_dir, None, metric, as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["sequences"], found["left_out"]) == (8 * kept, 8 * (GROUPS - kept))
    latest = {f"rated/{number}" for number in range(GROUPS - kept, GROUPS)}
    assert set(found["most_disputed"]) == latest
    assert ratings(run_dir, None, metric, as_json=False) == 0
    assert f"  {8 * (GROUPS - kept)} earlier sequences left out" in capsys.readouterr().out
    monkeypatch.setattr(agree, "RATINGS_LIMIT", 1)
    assert ratings(run_dir, None, metric, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)[0]["sequences"] == 8


def test_groups_of_an_evaluation_alone_have_no_agreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir(mode=0o700)
    config = validate({"environment": {"math": {"entry": "m.py:M"}}})
    write_json(layout.config, config)
    with running_broker(config, layout):
        asyncio.run(evaluated(layout.root))
    assert ratings(layout.root, None, None, as_json=False) == 1
    assert f"({EVALUATED} groups of evaluations were left out)" in capsys.readouterr().err


def test_bad_requests_are_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="must be one of nominal, ordinal, interval, ratio"):
        ratings(tmp_path, None, "rational", as_json=False)
    write_json(RunLayout(tmp_path).config, validate({"broker": {"durability": "memory"}}))
    assert ratings(tmp_path, None, None, as_json=False) == 1
    assert "keeps no groups on disk" in capsys.readouterr().err
