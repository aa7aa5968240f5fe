"""The snippets of the guide to rewards run as they stand, and its table of raters is that of the registry."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.launch.preflight import checks
from rolloutmq.launch.settings import load, validate
from rolloutmq.services.rewards.builtin import BUILTIN
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy, play

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "rewards.md"
BLOCK = re.compile(r"<!-- test: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)


def blocks() -> dict[str, str]:
    return dict(BLOCK.findall(GUIDE.read_text()))


def names_of(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(blocks()[block], "rewards.md", "exec"), names)
    return names


def test_every_block_is_tested() -> None:
    assert len(blocks()) == GUIDE.read_text().count("```") // 2 == 5


def test_the_environment_scores_by_its_raters() -> None:
    right = ScriptedPolicy(lambda prompt: str(sum(map(int, prompt.rstrip("=").split("+")))))
    group = play(names_of("environment")["Addition"](), right)
    assert group.scores.tolist() == pytest.approx([(2 * 1 + 0.5 + 0.5 * 1) / 3.5] * 4)
    assert group.columns["raters"].values[0] == {"right": 2.0, "judge": 1.0, "brief": 0.5}


def test_an_own_rollout_sends_its_ratings() -> None:
    group = play(names_of("rollout")["Debate"](), ScriptedPolicy(lambda prompt: prompt.rstrip("=")))
    assert group.scores.tolist() == [1.0] * 4
    assert [row.tolist() for row in group["ratings"]] == [[1.0, 1.0]] * 4


def test_an_ensemble_works_alone() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", blocks()["alone"]], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert shown == "(1.0, 0.5, 0.0)\n"


def test_the_configuration_gives_a_class_its_raters(tmp_path: Path) -> None:
    code = blocks()["environment"]
    own = re.compile(r"    rewards = Ensemble\(.*?\n    \)\n", re.DOTALL)
    assert own.search(code)
    (tmp_path / "addition.py").write_text(own.sub("", code))
    (tmp_path / "run.toml").write_text(blocks()["configuration"])
    config = load(
        tmp_path / "run.toml", environ={}, assignments=["trainer.enabled=false", "inference.port=0"]
    )
    checks.check(config)
    environment = load_environment("add", config.environment["add"], tmp_path)
    group = play(environment, ScriptedPolicy("no"))
    assert group.scores.tolist() == [0.25] * 4  # the weighted median of 0, 0, 0.5 and 1


def test_the_health_section_is_valid() -> None:
    assert validate(tomllib.loads(blocks()["health"])).health.stop_on == ("collapse", "low_agreement")


def test_the_table_has_all_raters() -> None:
    section = GUIDE.read_text().partition("| rater | rating | options |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == sorted(BUILTIN)
