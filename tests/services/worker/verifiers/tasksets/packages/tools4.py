"""An environment of verifiers 0.4 with a tool, which a server of its own process runs: `2+3=`, a call, its result."""

from collections.abc import Iterator

import verifiers.v1 as vf
from adding_tools import Adding

__all__ = ["Questions"]


class QuestionConfig(vf.TaskConfig):  # type: ignore[misc]
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class QuestionsConfig(vf.TasksetConfig):  # type: ignore[misc]
    task: QuestionConfig = QuestionConfig()


class Question(vf.Task[vf.TaskData, vf.State, QuestionConfig]):  # type: ignore[misc]
    @classmethod
    def toolsets(cls, config: QuestionConfig) -> list[vf.Toolset]:
        return [Adding(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "It is 5.")


class Questions(vf.Taskset[Question, QuestionsConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Question]:
        yield Question(vf.TaskData(prompt="2+3="), self.config.task)
