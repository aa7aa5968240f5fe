"""An environment of `verifiers` 0.4 as one of ours: the tasks of its taskset are the rows, its episodes the
trajectories.

All sequences of a group answer one task, as episodes that run at once. Each is rewarded by itself: in 0.4 nothing
couples them. An error in one of them costs the group and ends the others.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, cast

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError, PolicyRefusedError, UsageError
from rolloutmq.services.worker.environment import Prompt
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.services.worker.verifiers.package import described
from rolloutmq.services.worker.verifiers.reward_functions import require_ratings
from rolloutmq.services.worker.verifiers.rows import PATIENCE, RowEnvironment
from rolloutmq.services.worker.verifiers.tasksets.configuration import Loaded, load_taskset
from rolloutmq.services.worker.verifiers.tasksets.proxy import GroupCalls, Proxy
from rolloutmq.services.worker.verifiers.tasksets.traces import trajectory_of
from rolloutmq.services.worker.verifiers.trajectories import messages_of

logger = logging.getLogger(__name__)

PLAIN: Final = "rolloutmq.services.worker.verifiers.tasksets.plain_renderer:PlainRenderer"
"""Renderer of a model whose chat template tells no roles."""


class TasksetEnvironment(RowEnvironment[Any]):
    """Adapter of one environment of theirs. Entered by the worker, like any environment with `async with`."""

    def __init__(self, loaded: Loaded, *, split: str = "train", patience_s: float = 300.0) -> None:
        """Adapt an environment.

        Args:
            loaded: The environment with its tasks.
            split: Data from which `task` draws: `train` or `eval`.
            patience_s: Seconds that a call of the policy waits for a server.

        Raises:
            ValueError: It has no task for the split.
        """
        held_out = loaded.held_out
        rows = held_out if held_out is not None and split == "eval" else loaded.tasks
        super().__init__(rows, held_out, split=split, patience_s=patience_s)
        self._theirs = loaded.theirs
        self._policies = loaded.policies
        self._renderer = loaded.renderer
        self._serving: Any = None
        self._proxy: Proxy | None = None

    @classmethod
    def loaded(
        cls, name: str, config: EnvironmentConfig, arguments: Mapping[str, Any], base_dir: Path
    ) -> "TasksetEnvironment":
        """Load the package of `[environment.NAME]`. Runs its code, in the main thread only.

        Args:
            name: Name of the section.
            config: The section.
            arguments: Its options with the values of their secrets.
            base_dir: Directory of the configuration file.

        Raises:
            ConfigError: The package or its tasks cannot be loaded, or it samples from a part of the distribution.
        """
        section = f"environment.{name}"
        found = load_taskset(section, config, arguments, base_dir)
        try:
            return cls(found, split=config.split, patience_s=PATIENCE * config.rollout_timeout_s)
        except ValueError as error:
            raise ConfigError(f"{section}.verifiers", str(error)) from error

    async def _set_up(self, stack: AsyncExitStack) -> None:
        self._proxy = await stack.enter_async_context(Proxy.listening())
        self._serving = self._theirs.serving()
        await self._serving.__aenter__()

    async def _tear_down(self) -> None:
        await self._serving.__aexit__(None, None, None)

    def prompt(self, task: Any) -> Prompt:
        """Return the messages with which the rollouts of a task begin, as far as the task says."""
        data = task.data
        system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        return cast(Prompt, [*system, *messages_of(data.prompt)])

    def _own_row(self, payload: Mapping[str, Any]) -> Any:
        first = self._rows[0]
        try:
            own = first.with_data()
            own.data = type(first.data).model_validate(dict(payload))
        except Exception as error:
            raise UsageError(f"payload: no task of this environment: {described(error)}") from error
        return own

    async def _answers(self, policy: Policy, task: Any, size: int) -> list[Trajectory]:
        assert self._proxy is not None, "enter the environment first"
        require_ratings(type(task))
        async with self._proxy.opened(policy, self._patience_s) as calls:
            context = self._context(await calls.endpoint())
            try:
                async with asyncio.TaskGroup() as group:
                    slots = self._theirs.slots(task, size)
                    rolling = [group.create_task(self._rolled(slot, context, calls)) for slot in slots]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [one.result() for one in rolling]

    async def _rolled(self, slot: Any, context: Any, calls: GroupCalls) -> Trajectory:
        proxy = self._proxy
        assert proxy is not None
        episode = await self._theirs.run_slot(
            slot, context, on_trace=lambda trace: proxy.expect(calls, trace.id)
        )
        return trajectory_of(episode, calls.sampled, self._policies, calls.refusal)

    def _context(self, endpoint: Endpoint) -> Any:
        from verifiers.v1 import ModelContext, TrainClientConfig

        assert self._proxy is not None
        if not endpoint.root:
            raise PolicyRefusedError(
                200,
                "/v1/models names no `root`, the directory of the model, whose tokenizer renders the messages",
            )
        client = TrainClientConfig(
            base_url=self._proxy.base_url,
            api_key_var="",
            renderer_model_name=endpoint.root,
            renderer=self._renderer or _plain(endpoint.root),
        )
        return ModelContext(model=endpoint.model, client=client)


def _plain(root: str) -> Any:
    """Return the renderer of a model whose chat template tells no roles; None if theirs chooses one."""
    from renderers import CustomRendererConfig

    from rolloutmq.services.worker.verifiers.tasksets.plain_renderer import tells_roles

    model = Path(root)
    return CustomRendererConfig(import_path=PLAIN) if model.is_dir() and not tells_roles(model) else None
