"""An environment of verifiers 0.4 with several turns, which the environment plays: `7=`, an answer, `1=`, and so on."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from additions import OneCall

__all__ = ["DialogueEnv", "Dialogues", "OneCall"]


class DialogueConfig(vf.TasksetConfig):  # type: ignore[misc]
    rows: int = 10


class DialogueTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @vf.reward(weight=0.5)
    async def answered(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Dialogues(vf.Taskset[DialogueTask, DialogueConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[DialogueTask]:
        for number in range(self.config.rows):
            yield DialogueTask(vf.TaskData(prompt=f"{number}="), self.config.task)


class DialogueEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    player: vf.AgentConfig = vf.AgentConfig()
    turns: int = 3


class DialogueEnv(vf.Env[DialogueEnvConfig]):  # type: ignore[misc]
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            for number in range(1, self.config.turns):
                if (await interaction.turn(f"{number}=")).terminated:
                    return
