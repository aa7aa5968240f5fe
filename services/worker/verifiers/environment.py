"""An environment of `verifiers` as one of ours: the rows of its data sets are the tasks, its rollouts the trajectories.

A task is a row of its training data, or of its evaluation data with `split = "eval"` and in evaluations; a package
without evaluation data is evaluated with its training data. Task i of the task space is row i. A submitted task is
the number of a row, or a row of its own: a mapping with a `prompt`, and whatever the rewards ask for.

All sequences of a group begin at one row, run at once, and are rewarded together, as their trainers do. An error, a
hang or an exception in one of them, or in a reward function, costs the group.
"""

import asyncio
import logging
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, cast

from rolloutmq.schemas.config.environment import EnvironmentConfig, SamplingConfig
from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.services.worker.environment import GroupPerTask, Prompt
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.services.worker.verifiers.package import load_package
from rolloutmq.services.worker.verifiers.request_fields import hoisted, refusal
from rolloutmq.services.worker.verifiers.reward_functions import failures, reason, watch
from rolloutmq.services.worker.verifiers.trajectories import STATE_COLUMNS, RolloutFailedError, trajectory_of

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
PATIENCE: Final = 0.9
"""Fraction of `rollout_timeout_s` that a call of the policy waits for a server, so that the rollout can tell why."""
TEARDOWN_S: Final = 10.0
"""Seconds for the teardown of the package when a worker ends."""


class VerifiersEnvironment(GroupPerTask[Row]):
    """Adapter of one environment of theirs. Entered by the worker, like any environment with `async with`."""

    def __init__(
        self,
        theirs: Any,
        *,
        split: str = "train",
        sampling: Mapping[str, Any] | None = None,
        patience_s: float = 300.0,
    ) -> None:
        """Adapt an environment.

        Args:
            theirs: Environment of the package.
            split: Its data from which `task` draws: `train` or `eval`.
            sampling: Fields of each request, see `sampling_of`.
            patience_s: Seconds that a call of the policy waits for a server.

        Raises:
            ValueError: It has no data for the split.
        """
        self._theirs = theirs
        self._sampling = {} if sampling is None else dict(sampling)
        self._patience_s = patience_s
        self._stack = AsyncExitStack()
        self._openai: Any = None
        watch(theirs.rubric)
        has_own = getattr(theirs, "eval_dataset_source", None) is not None
        self._held_out: Any = theirs.get_eval_dataset() if has_own else None
        rows: Any = theirs.get_eval_dataset() if has_own and split == "eval" else theirs.get_dataset()
        self._rows = rows
        if not len(self._rows):
            raise ValueError(f"the data set for `{split}` has no row")

    @classmethod
    def loaded(
        cls, name: str, config: EnvironmentConfig, arguments: Mapping[str, Any], base_dir: Path
    ) -> "VerifiersEnvironment":
        """Load the package of `[environment.NAME]`. Runs its code, in the main thread only.

        Args:
            name: Name of the section.
            config: The section.
            arguments: Its options with the values of their secrets.
            base_dir: Directory of the configuration file.

        Raises:
            ConfigError: The package or its data cannot be loaded, or it samples from a part of the distribution.
        """
        section = f"environment.{name}"
        theirs = load_package(section, config.verifiers, arguments, base_dir)
        if config.group_deadline_s and getattr(theirs.rubric, "has_group_rewards", False):
            raise ConfigError(
                f"{section}.group_deadline_s",
                f"must be 0 for {config.verifiers}, whose rewards compare the sequences of a whole group "
                f"(got {config.group_deadline_s:g})",
            )
        if config.split == "train" and _has_evaluation_data_alone(theirs):
            raise ConfigError(
                f"{section}.split",
                f'{config.verifiers} has evaluation data alone (got "train"); set split = "eval"',
            )
        try:
            made = cls(
                theirs,
                split=config.split,
                sampling=sampling_of(f"{section}.sampling", theirs.sampling_args, config.sampling),
                patience_s=PATIENCE * config.rollout_timeout_s,
            )
        except ConfigError:
            raise
        except Exception as error:
            logger.exception("data of an environment package failed package=%s", config.verifiers)
            raise ConfigError(
                f"{section}.verifiers", f"the data of {config.verifiers} cannot be loaded: {error}"
            ) from error
        made._check_task_count(f"{section}.task_count", config)
        return made

    def _check_task_count(self, key: str, config: EnvironmentConfig) -> None:
        rows = len(self._rows)
        if config.task_count > rows:
            raise ConfigError(
                key,
                f"must not exceed the number of rows of {config.verifiers}, {rows:,} (got {config.task_count:,}); "
                "lower it",
            )

    async def __aenter__(self) -> "VerifiersEnvironment":
        from rolloutmq.services.worker.verifiers.client import openai_client

        self._openai = await self._stack.enter_async_context(openai_client())
        self._stack.push_async_callback(self._tear_down)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _tear_down(self) -> None:
        """Let the package end what it holds. Its failure or hang must not keep the worker."""
        try:
            async with asyncio.timeout(TEARDOWN_S):
                await self._theirs._teardown()
        except Exception:
            logger.exception("teardown of an environment package failed")

    def task(self, rng: random.Random) -> Row:
        """Draw a row."""
        return cast(Row, self._rows[rng.randrange(len(self._rows))])

    def task_at(self, index: int, rng: random.Random) -> Row:  # noqa: ARG002 - rows have numbers
        """Return the row of that number. LookupError if there are fewer."""
        return cast(Row, self._rows[index])

    def eval_task_at(self, index: int, rng: random.Random) -> Row:  # noqa: ARG002
        """Return the row of that number of the evaluation data. LookupError if there are fewer."""
        return cast(Row, (self._rows if self._held_out is None else self._held_out)[index])

    def prompt(self, task: Row) -> Prompt:
        """Return the messages with which the rollouts of a row begin."""
        return cast(Prompt, task["prompt"])

    def submitted(self, payload: Any) -> Row:
        """Return the row of that number, or the payload as a row.

        Raises:
            LookupError: There are fewer rows.
            UsageError: It is neither a number nor a row with a prompt.
        """
        if isinstance(payload, int) and not isinstance(payload, bool) and payload >= 0:
            return cast(Row, self._rows[payload])
        if isinstance(payload, Mapping) and isinstance(payload.get("prompt"), str | list):
            return {"example_id": 0, **payload}
        raise UsageError(
            "payload: a task for an environment of verifiers is the number of a row, or a mapping with a `prompt` "
            f"(got {payload!r:.80})"
        )

    async def _answers(self, policy: Policy, task: Row, size: int) -> list[Trajectory]:
        from rolloutmq.services.worker.verifiers.client import PolicyClient

        with failures() as failed:
            async with PolicyClient.opened(self._openai, policy, self._patience_s) as client:
                rollouts = await self._theirs.run_group(
                    [dict(task) for _ in range(size)],
                    client,
                    "the policy",
                    dict(self._sampling),
                    state_columns=[*STATE_COLUMNS],
                )
        single = getattr(self._theirs, "max_turns", None) == 1
        weights = watch(self._theirs.rubric)
        made = [
            trajectory_of(one, client.sampled, weights, single_turn=single, overlong=client.overlong)
            for one in rollouts
        ]
        if failed:  # an error of the rollout itself goes first: it may be why the reward failed
            raise RolloutFailedError(reason(failed[0])) from failed[0]
        return made


def _has_evaluation_data_alone(theirs: Any) -> bool:
    has_own = getattr(theirs, "eval_dataset_source", None) is not None
    return has_own and getattr(theirs, "dataset_source", has_own) is None


def sampling_of(key: str, theirs: Mapping[str, Any], ours: SamplingConfig) -> dict[str, Any]:
    """Return the fields of each request: those of the environment, and those of the section, which win.

    Raises:
        ConfigError: A field is refused, see `request_fields`.
    """
    given, extra = hoisted(theirs)
    extra |= ours.extra
    chosen = {"max_tokens": ours.max_tokens, "temperature": ours.temperature}
    chosen = {name: one for name, one in chosen.items() if one is not None}
    fields = {name: value for name, value in {**given, **chosen}.items() if value is not None}
    for name, value in {**fields, **extra}.items():
        problem = refusal(name, value, extra=name in extra)
        if problem and name in ours.extra:
            raise ConfigError(f"{key}.extra", problem)
        if problem:
            raise ConfigError(key, f"{problem}; the package sets it")
    # Always explicit: the defaults of a server may come from the model's directory.
    return {"temperature": 1.0, "top_p": 1.0, **fields, "extra_body": extra}
