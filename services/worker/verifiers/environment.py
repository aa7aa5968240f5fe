"""An environment of `verifiers` up to 0.3 as one of ours: the rows of its data are the tasks (`rows`), its rollouts the
trajectories.

All sequences of a group begin at one row, run at once, and are rewarded together, as their trainers do. An error, a
hang or an exception in one of them, or in a reward function, costs the group.
"""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.printable import error_line
from rolloutmq.services.worker.environment import Prompt
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.services.worker.verifiers.package import load_package
from rolloutmq.services.worker.verifiers.reward_functions import failures, reason, watch
from rolloutmq.services.worker.verifiers.rows import PATIENCE, RowEnvironment
from rolloutmq.services.worker.verifiers.sampling import sampling_of
from rolloutmq.services.worker.verifiers.trajectories import STATE_COLUMNS, RolloutFailedError, trajectory_of

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


class VerifiersEnvironment(RowEnvironment[Row]):
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
        has_own = getattr(theirs, "eval_dataset_source", None) is not None
        rows = theirs.get_eval_dataset() if has_own and split == "eval" else theirs.get_dataset()
        held_out = theirs.get_eval_dataset() if has_own else None
        super().__init__(rows, held_out, split=split, patience_s=patience_s)
        self._theirs = theirs
        self._sampling = {} if sampling is None else dict(sampling)
        self._openai: Any = None
        watch(theirs.rubric)

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
        if not getattr(theirs, "score_rollouts", True):
            raise ConfigError(
                f"{section}.verifiers",
                f"{config.verifiers} does not score its rollouts (got score_rollouts = False), so every score would be "
                "0; set it to True",
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
                sampling=sampling_of(
                    f"{section}.sampling",
                    theirs.sampling_args,
                    config.sampling,
                    trains=config.split == "train",
                ),
                patience_s=PATIENCE * config.rollout_timeout_s,
            )
        except ConfigError:
            raise
        except Exception as error:
            logger.exception("data of an environment package failed package=%s", config.verifiers)
            raise ConfigError(
                f"{section}.verifiers",
                f"the data of {config.verifiers} cannot be loaded: {error_line(error)}",
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

    async def _set_up(self, stack: AsyncExitStack) -> None:
        from rolloutmq.services.worker.verifiers.client import openai_client

        self._openai = await stack.enter_async_context(openai_client())

    async def _tear_down(self) -> None:
        await self._theirs._teardown()

    def prompt(self, task: Row) -> Prompt:
        """Return the messages with which the rollouts of a row begin."""
        return cast(Prompt, task["prompt"])

    def _own_row(self, payload: Mapping[str, Any]) -> Row:
        return {"example_id": 0, **payload}

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
