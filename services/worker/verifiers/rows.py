"""Tasks of a package of `verifiers`: the rows of its data, by number. What the adapters of both its interfaces share.

Task i of the task space is row i. Tasks are drawn from the training data, or from the evaluation data with
`split = "eval"`; evaluations have the evaluation data. A package without evaluation data is evaluated with its
training data. A submitted task is the number of a row, or a row of its own: a mapping with a `prompt`, and whatever the
rewards ask for.
"""

import asyncio
import logging
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Self, TypeVar

from rolloutmq.schemas.errors import UsageError
from rolloutmq.services.worker.environment import GroupPerTask

logger = logging.getLogger(__name__)

PATIENCE: Final = 0.9
"""Fraction of `rollout_timeout_s` that a call of the policy waits for a server, so that the rollout can tell why."""
TEARDOWN_S: Final = 10.0
"""Seconds for the teardown of the package when a worker ends."""

Row = TypeVar("Row")


class RowEnvironment(GroupPerTask[Row]):
    """Base of the adapters. Entered by the worker, like any environment with `async with`."""

    def __init__(
        self, rows: Sequence[Row], held_out: Sequence[Row] | None, *, split: str, patience_s: float
    ) -> None:
        """Adapt a package.

        Args:
            rows: Data of the split, from which `task` draws.
            held_out: Its evaluation data; None if it has none.
            split: `train` or `eval`.
            patience_s: Seconds that a call of the policy waits for a server.

        Raises:
            ValueError: It has no data for the split.
        """
        self._rows = rows
        self._held_out = held_out
        self._patience_s = patience_s
        self._stack = AsyncExitStack()
        if not len(self._rows):
            raise ValueError(f"the data set for `{split}` has no row")

    @abstractmethod
    async def _set_up(self, stack: AsyncExitStack) -> None:
        """Open what the rollouts need; the stack closes it after the package's teardown."""

    @abstractmethod
    async def _tear_down(self) -> None:
        """Let the package end what it holds."""

    async def __aenter__(self) -> Self:
        await self._set_up(self._stack)
        self._stack.push_async_callback(self._torn_down)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _torn_down(self) -> None:
        """Tear the package down. Its failure or hang must not keep the worker."""
        try:
            async with asyncio.timeout(TEARDOWN_S):
                await self._tear_down()
        except Exception:
            logger.exception("teardown of an environment package failed")

    def task(self, rng: random.Random) -> Row:
        """Draw a row."""
        return self._rows[rng.randrange(len(self._rows))]

    def task_at(self, index: int, rng: random.Random) -> Row:  # noqa: ARG002 - rows have numbers
        """Return the row of that number. LookupError if there are fewer."""
        return self._rows[index]

    def eval_task_at(self, index: int, rng: random.Random) -> Row:  # noqa: ARG002
        """Return the row of that number of the evaluation data. LookupError if there are fewer."""
        return (self._rows if self._held_out is None else self._held_out)[index]

    @abstractmethod
    def _own_row(self, payload: Mapping[str, Any]) -> Row:
        """Return a submitted mapping with a `prompt` as a row. Raises UsageError."""

    def submitted(self, payload: Any) -> Row:
        """Return the row of that number, or the payload as a row.

        Raises:
            LookupError: There are fewer rows.
            UsageError: It is neither a number nor a row with a prompt.
        """
        if isinstance(payload, int) and not isinstance(payload, bool) and payload >= 0:
            return self._rows[payload]
        if isinstance(payload, Mapping) and isinstance(payload.get("prompt"), str | list):
            return self._own_row(payload)
        raise UsageError(
            "payload: a task for an environment of verifiers is the number of a row, or a mapping with a `prompt` "
            f"(got {payload!r:.80})"
        )
