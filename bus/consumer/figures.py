"""Figures of a trainer: checked in the caller, queued, and sent to the broker in the background.

Logging never waits and never ends a training. A wrong call, such as a text for a number, raises at once; a value that
is infinite or not a number is no error: its name is reported instead. A queue without a broker keeps the newest steps.
"""

import asyncio
import logging
import math
import re
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from operator import index
from typing import Any, Final, SupportsFloat, SupportsIndex

from rolloutmq.bus.consumer.connection import ConsumerConnection
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.errors import RolloutMQError, UsageError
from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.requests import LOGGED_LIMIT, LogFigures
from rolloutmq.schemas.wire.training import FIGURES_LIMIT, StepFigures

logger = logging.getLogger(__name__)

QUEUED_LIMIT: Final = 1024
"""Most steps that wait for the broker; beyond it the oldest are dropped."""
LAST_S: Final = 1.0
"""Longest wait at the end for the figures under way."""
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}")

Figure = SupportsFloat
"""A number, also of numpy, or a torch tensor of one element."""


def step_figures(
    run: str, version: PolicyVersion, step: SupportsIndex, figures: Mapping[str, Figure]
) -> StepFigures:
    """Return the checked figures of a step.

    Raises:
        UsageError: The step is no number from 0, there are too many figures, a name has other characters than letters,
            digits, `_`, `.`, `/` and `-`, or a value is no number.
    """
    if len(figures) > FIGURES_LIMIT:
        raise UsageError(
            f"log: takes at most {FIGURES_LIMIT} figures (got {len(figures)}); log fewer of a step"
        )
    number = _step(step)
    values = {_name(name): _number(name, value) for name, value in figures.items()}
    return StepFigures(
        run=run,
        incarnation=version.incarnation,
        step=number,
        at=time.time(),
        figures={name: value for name, value in values.items() if math.isfinite(value)},
        not_finite=tuple(name for name, value in values.items() if not math.isfinite(value)),
    )


def _step(step: SupportsIndex) -> int:
    """Return a step number, also of an integer of numpy or of a tensor of one; a truth value is none."""
    try:
        number = -1 if isinstance(step, bool) else index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise UsageError(f"log.step: must be a step number from 0, such as `batch.step` (got {step!r:.80})")
    return number


def _name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"log.{printable(name[:80])}: must be a name of at most 64 letters, digits, `_`, `.`, `/` and `-`, and not "
            "begin with a digit; rename the figure"
        )
    return name


def _number(name: str, value: Figure) -> float:
    if isinstance(value, str | bytes):
        raise UsageError(f"log.{name}: must be a number (got {value[:40]!r})")
    try:
        item: Any = getattr(value, "item", None)  # a tensor with a gradient warns of `float`
        number: Any = value if item is None else item()
        return float(number)
    except OverflowError:
        return math.inf
    except Exception as error:  # noqa: BLE001 - a tensor of several elements raises whatever its library wants
        raise UsageError(f"log.{name}: must be a number (got {type(value).__name__}: {error})") from None


class FigureQueue:
    """Logged figures on their way to the broker. For the consumer's event loop.

    Args:
        link: Connection of the consumer.
    """

    def __init__(self, link: ConsumerConnection) -> None:
        self._link = link
        self._queue: deque[StepFigures] = deque()
        self._there = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._dropped = 0
        self._not_finite = LogThrottle()

    def checked(
        self, version: PolicyVersion, step: SupportsIndex, figures: Mapping[str, Figure]
    ) -> StepFigures:
        """Return the figures of a step of a policy's incarnation; see `step_figures`. In any thread."""
        known = self._link.registered
        info = known.info if known else self._link.register.info
        return step_figures(info.run, version, step, figures)

    def put(self, one: StepFigures) -> None:
        """Queue the figures of a step; those of a rank but the first are dropped. Never waits."""
        if self._link.register.rank:
            return
        names = ",".join(one.not_finite)
        if self._not_finite.is_due(names, time.monotonic()):
            logger.warning("figures not finite step=%d names=%s", one.step, names)
        if len(self._queue) >= QUEUED_LIMIT:
            self._queue.popleft()
            self._count(1, "the broker does not take them")
        self._queue.append(one)
        self._there.set()
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="figures")

    async def _send(self) -> None:
        is_last = False
        while not is_last:
            await self._there.wait()
            self._there.clear()
            is_last = self._closing
            while self._queue:
                await self._send_some()

    async def _send_some(self) -> None:
        logged = tuple(islice(self._queue, LOGGED_LIMIT))
        for _ in logged:
            self._queue.popleft()
        try:
            await self._link.ask(LogFigures(consumer=self._link.register.consumer, logged=logged))
        except RolloutMQError as error:
            self._count(len(logged), str(error))

    def _count(self, steps: int, why: str) -> None:
        before, self._dropped = self._dropped, self._dropped + steps
        if before.bit_length() < self._dropped.bit_length():  # a long outage must not fill the log
            logger.warning("figures not logged steps=%d reason=%s", self._dropped, why)

    async def close(self) -> None:
        """Send what is queued, for at most `LAST_S`. A request under way is not sent again."""
        if self._task is None:
            return
        self._closing = True
        self._there.set()
        await asyncio.wait({self._task}, timeout=LAST_S)
        self._task.cancel()
        await asyncio.wait({self._task})
