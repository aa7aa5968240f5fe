"""An environment of verifiers 0.4 in which each task says what goes wrong."""

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from additions import OneCall

__all__ = ["Mishaps", "OddEnv", "OddHarness"]

WAYS = (
    "fine",
    "raises",
    "harness",
    "hangs",
    "rewards",
    "nan",
    "silent",
    "rewrites",
    "twice",
    "episode",
    "changes",
    "late",
    "exits",
    "judge exits",
    "nothing",
    "maps",
)


class MishapData(vf.TaskData):  # type: ignore[misc]
    way: str = "fine"


class Mishap(vf.Task[MishapData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:  # noqa: ARG002 - theirs
        if self.data.way == "raises":
            raise KeyError("no such thing")
        if self.data.way == "hangs":
            await asyncio.Event().wait()

    @vf.intercept
    async def changed(self, response: vf.Response) -> vf.Response | None:
        if self.data.way != "changes":
            return None
        return response.model_copy(update={"message": vf.AssistantMessage(content="1")})

    @vf.reward
    async def reward(self, task: MishapData) -> float | dict[str, float]:
        if task.way == "rewards":
            raise ZeroDivisionError("in the reward")
        if task.way == "judge exits":
            raise SystemExit(3)
        if task.way == "nothing":
            return {}
        if task.way == "late":
            await asyncio.sleep(60)
        return float("nan") if task.way == "nan" else 1.0

    @vf.reward(weight=2.0)
    async def various(self, task: MishapData) -> float | dict[str, float]:
        return {"first": 1.0, "second": 0.5} if task.way == "maps" else 0.0


class MishapsConfig(vf.TasksetConfig):  # type: ignore[misc]
    fail: bool = False
    endless: bool = False


class Mishaps(vf.Taskset[Mishap, MishapsConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Mishap]:
        if self.config.fail:
            raise ValueError("no data")
        while True:
            for way in WAYS:
                yield Mishap(MishapData(prompt="1=", way=way), self.config.task)
            if not self.config.endless:
                return

    @property
    def bounded(self) -> bool:
        return not self.config.endless


class OddHarness(OneCall):  # type: ignore[misc]
    async def launch(self, ctx: Any, trace: Any, *more: Any) -> Any:
        way = getattr(trace.task.data, "way", "")
        if way == "harness":
            return vf.ProgramResult(exit_code=3, stdout="", stderr="no program")
        if way == "exits":
            raise SystemExit(0)
        if way == "silent":
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        result = await super().launch(ctx, trace, *more)
        if way == "rewrites":
            *others, data = more
            again = data.model_copy(update={"prompt": "2="})
            result = await super().launch(ctx, trace, *others, again)
        return result


class OddEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    agent: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class OddEnv(vf.Env[OddEnvConfig]):  # type: ignore[misc]
    async def setup(self, agents: Any) -> None:
        agents.judge.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)
        if task.data.way == "fine":
            await agents.judge.run(task)
        if task.data.way == "twice":
            await agents.agent.run(task)
        if task.data.way == "episode":
            raise RuntimeError("the episode broke")
