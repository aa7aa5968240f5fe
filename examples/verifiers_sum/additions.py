"""Additions as an environment package of `verifiers` 0.4: a taskset, and a harness that asks the model once a turn.

The harness has no program: it calls the endpoint of its rollout in the worker's process, which takes milliseconds.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["Additions", "OneCall"]

TLS = httpx.create_ssl_context(trust_env=False)
"""Made once: to load its certificates takes more CPU than the rest of an episode."""


class AdditionsConfig(vf.TasksetConfig):
    digits: int = 1
    first: int = 0
    rows: int = 100


class AdditionData(vf.TaskData):
    total: int


class Addition(vf.Task[AdditionData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: AdditionData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.total))

    @vf.reward(weight=0.5)
    async def near(self, task: AdditionData, trace: vf.Trace) -> float:
        """Reward a number by its distance from the sum."""
        said = trace.last_reply
        return 1 / (1 + abs(int(said) - task.total)) if said.isdecimal() else 0.0

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Additions(vf.Taskset[Addition, AdditionsConfig]):
    def load(self) -> Iterator[Addition]:
        for number in range(self.config.first, self.config.first + self.config.rows):
            b, a = divmod(number, 10**self.config.digits)
            yield Addition(AdditionData(prompt=f"{a}+{b}=", total=a + b), self.config.task)


class OneCall(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_RESUME = True  # an environment may go on with a conversation
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002 - the signature of a harness
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: Any,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(_sent, prompt or ())
        )
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=TLS) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        failed = answer.status_code != 200
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text if failed else "")


def _sent(message: Any) -> dict[str, str]:
    return {"role": message.role, "content": message.content or ""}
