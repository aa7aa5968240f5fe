"""The judge example: grades become ratings, and a judge without a grade gives none."""

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.examples.served import serving

from benchmarks.end_to_end import scenario
from rolloutmq.launch.settings import load
from rolloutmq.schemas.errors import RatersMissingError
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy

EXAMPLES = Path(__file__).parents[2] / "examples" / "rubric"
DEADLINE_S = 60.0


def stand_in() -> web.Application:
    spec = importlib.util.spec_from_file_location("stand_in_judge", EXAMPLES / "stand_in_judge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    application: web.Application = module.application()
    return application


def replying(reply: Callable[[], web.Response]) -> web.Application:
    async def handle(_request: web.Request) -> web.Response:
        return reply()

    application = web.Application()
    application.router.add_post("/v1/chat/completions", handle)
    return application


def rated(application: web.Application, answer: Any) -> Any:
    """Return a group with the ratings of a judge."""

    async def asked() -> Any:
        async with serving(application) as url:
            told = [
                f'environment.judged.rewards.raters.judge.options={{ url = "{url}/v1" }}',
                "environment.judged.rewards.raters.judge.retries=0",
            ]
            config = load(EXAMPLES / "judge.toml", environ={}, assignments=told)
            environment: Any = load_environment("judged", config.environment["judged"], config.base_dir)
            return await environment.rollout_task(ScriptedPolicy(answer), "312", 2, None)

    return asyncio.run(asyncio.wait_for(asked(), DEADLINE_S))


@pytest.mark.parametrize(("answer", "score"), [("123", 1.0), ("132", 0.3), ("", 0.0)])
def test_the_grade_is_the_score(answer: str, score: float) -> None:
    for trajectory in rated(stand_in(), answer):
        assert trajectory.score == score
        assert trajectory.columns["ratings"] == [score]


def test_no_grade_is_no_rating() -> None:
    def silent() -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "Well done!"}}]})

    for reply in (silent, lambda: web.Response(status=500)):
        with pytest.raises(RatersMissingError, match="too few ratings of an answer"):
            rated(replying(reply), "123")


def test_the_example_is_as_short_as_promised() -> None:
    lines = (EXAMPLES / "judge.py").read_text().splitlines()
    assert len(lines) <= 60


@pytest.mark.extended
def test_the_policy_learns_from_the_judge(tmp_path: Path) -> None:
    async def judged() -> tuple[int, dict[str, Any]]:
        async with serving(stand_in()) as url:
            options = f'environment.judged.rewards.raters.judge.options={{ url = "{url}/v1" }}'
            told = (options, "trainer.steps=150")
            run = asyncio.to_thread(
                scenario.run, tmp_path / "run", told, config=EXAMPLES / "judge.toml", deadline_s=500.0
            )
            return await run

    code, summary = asyncio.run(judged())
    assert code == 0
    assert summary["groups_lost"] == summary["groups_dead"] == 0
    assert summary["reward_last"] > summary["reward_first"] + 0.15
