"""The bridge: asks the bus for the groups of verl's prompts, puts them into TransferQueue, and reports their outcome.

    submit -> running -> a worker answers the task -> trajectories in TransferQueue -> finished
    a step uses them -> `finish` settles their groups -> `commit` with the checkpoint

TransferQueue keeps nothing beyond its process. So a group is settled only once a step has used it, and the broker
delivers again what a killed trainer had put and not used, or used after its checkpoint. Nothing is raised for a single
prompt: a group that failed, is late or lost makes its prompt a `failure`, which verl's replay buffer replaces.

The connection lives in a thread of its own, so heartbeats and puts go on while a training step blocks.
"""

import asyncio
import atexit
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from rolloutmq.bus.blocking import LoopThread
from rolloutmq.bus.encoding import topics
from rolloutmq.bus.transport.endpoint import is_address, resolve
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.schemas.errors import ClosedError, ConfigError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.checkpoint import next_incarnation
from rolloutmq.trainer.integrations.task_feed.answers import Missing
from rolloutmq.trainer.integrations.task_feed.feed import Feed
from rolloutmq.trainer.integrations.verl.prompts import Prompt, content_key
from rolloutmq.trainer.integrations.verl.rows import Status, trajectories

logger = logging.getLogger(__name__)

EVALUATED: Final = PolicyVersion(0, 1 << 62)
"""Version that covers every group of a validation: nobody resumes one."""
COMMIT_S: Final = 60.0
"""Longest wait of a commit; the next one covers it."""


class Store(Protocol):
    """What the bridge writes to, see `store.TransferQueueStore`."""

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        fields: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write tags, and fields if given. Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusOptions:
    """Settings of the bus, `bus` in verl's configuration.

    Attributes:
        where: Run directory, or address of the broker's `serve` socket. Required.
        environment: Environment of the bus for prompts whose data source is not in `environments`.
        environments: Environment of the bus for each data source.
        name: Name of the training at the broker, and first part of its task ids. Keep it for a resumed training.
        deadline_s: Longest time from a prompt to its group, in seconds.
        timeout_s: Longest wait for the broker when the bus is joined, in seconds.
    """

    where: str
    environment: str = ""
    environments: Mapping[str, str] = field(default_factory=dict)
    name: str = "verl"
    deadline_s: float = 1800.0
    timeout_s: float = 60.0

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> "BusOptions":
        """Return the options of `bus` in verl's configuration.

        Raises:
            ConfigError: A key is unknown, missing or out of range; names it.
        """
        given = dict(given or {})
        known = set(cls.__slots__)
        for key in given:
            if key not in known:
                raise ConfigError(f"bus.{key}", f"unknown key; allowed: {', '.join(sorted(known))}")
        if not given.get("where"):
            raise ConfigError(
                "bus.where", "must be a run directory or a broker's address; add +bus.where=..."
            )
        made = cls(**given)
        if not (made.environment or made.environments):
            raise ConfigError("bus.environment", "must name an environment of the run (got none)")
        if not 0 < len(made.name) <= 40 or not made.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError("bus.name", f"must be 1 to 40 letters, digits, - or _ (got {made.name!r})")
        if made.deadline_s <= 0:
            raise ConfigError("bus.deadline_s", f"must be positive (got {made.deadline_s})")
        return made

    def environment_of(self, prompt: Prompt) -> str:
        """Return the environment of a prompt."""
        source = str(prompt.fields.get("data_source", ""))
        return self.environments.get(source, self.environment) or source


@dataclass
class Bridge:
    """Groups of the bus in TransferQueue. For one trainer; all calls come from its thread.

    Attributes:
        options: Settings of the bus.
        store: What the groups are put into.
        info: Description of the run; `batch_sequences` is required.
        checkpoints: Folder of the trainer's checkpoints, for a run that is not on this machine.
    """

    options: BusOptions
    store: Store
    info: RunInfo
    checkpoints: Path
    _loop: LoopThread | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _training: Feed | None = None
    _validation: Feed | None = None
    _incarnation: int = 0
    _used: dict[int, tuple[set[str], set[str]]] = field(default_factory=dict)
    """Prompts of each step that is not settled: those with trajectories, and those without."""
    _missing: Counter[Missing] = field(default_factory=Counter)
    _closing: bool = False

    # Prompts

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Ask for the groups of prompts, and return at once. The first call joins the bus, and waits for the broker.

        Raises:
            WaitTimeoutError: There is no broker; tells where it was looked for.
            RefusedError: The broker does not accept this trainer.
        """
        if not prompts:
            return
        loop = self._loop = self._loop or LoopThread(f"rolloutmq {self.options.name}")
        if prompts[0].validates:
            if self._validation is None:
                self._validation = loop.run(self._open(Split.EVAL, None))
            feed = self._validation
        else:
            if self._training is None:
                self._training = loop.run(self._join(prompts[0].step - 1))
            feed = self._training
        loop.future(self._submitted(feed, prompts)).add_done_callback(_log_failure)

    async def _join(self, step: int) -> Feed:
        where = self.options.where
        counter = self.checkpoints if is_address(where) else RunLayout(Path(where)).checkpoints
        self._incarnation = await asyncio.to_thread(next_incarnation, counter)
        version = PolicyVersion(self._incarnation, step)
        feed = await self._open(Split.TRAIN, version)
        events = self._stack.enter_context(Publisher((await resolve(where)).publish))
        feed.on_step = lambda event: events.publish(topics.STEP, event)
        atexit.register(self.close)
        logger.info("joined the bus incarnation=%d step=%d", version.incarnation, version.step)
        return feed

    async def _open(self, split: Split, resume: PolicyVersion | None) -> Feed:
        opening = Feed.open(
            self.options.where,
            training=self.options.name,
            batch_sequences=self.info.batch_sequences,
            deadline_s=self.options.deadline_s,
            split=split,
            resume=resume,
            resumed=resume is not None and resume > PolicyVersion(),
            content_key=content_key if split is Split.TRAIN else None,
            info=self.info if resume is not None else None,
            timeout_s=self.options.timeout_s,
        )
        return await self._stack.enter_async_context(opening)

    async def _submitted(self, feed: Feed, prompts: Sequence[Prompt]) -> None:
        await self._tag(prompts, Status.RUNNING)
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(self._answered(feed, prompt))

    async def _answered(self, feed: Feed, prompt: Prompt) -> None:
        """Put the group of a prompt, then its status; never raises."""
        status = Status.FAILURE
        try:
            status = await self._put(feed, prompt)
        except Exception:  # the trainer does not end for one prompt
            logger.exception("prompt without trajectories uid=%s", prompt.uid)
        if self._closing:
            return
        try:
            await self._tag([prompt], status)
            if prompt.validates:
                await feed.settle((prompt.uid,), ())
                await feed.consumer.commit(EVALUATED)
        except Exception:
            logger.exception("status not reported uid=%s status=%s", prompt.uid, status)

    async def _put(self, feed: Feed, prompt: Prompt) -> Status:
        answer = await feed.ask(
            prompt.uid,
            prompt.task(self.options.name),
            self.options.environment_of(prompt),
            prompt.payload,
            prompt.size,
        )
        if answer.group is None:
            self._missing[answer.missing or Missing.LOST] += 1
            return Status.FAILURE
        found = trajectories(answer.group, prompt)
        if found.missing:
            self._missing[Missing.SHORT] += 1
            logger.warning("trajectories missing uid=%s missing=%d", prompt.uid, found.missing)
        if found.keys:
            await asyncio.to_thread(self.store.put, prompt.partition, found.keys, found.tags, found.fields)
        return found.status

    async def _tag(self, prompts: Sequence[Prompt], status: Status) -> None:
        tags = [{"status": str(status)}] * len(prompts)
        keys = [prompt.uid for prompt in prompts]
        await asyncio.to_thread(self.store.put, prompts[0].partition, keys, tags)

    # Outcome

    def use(self, step: int, trained: Iterable[str], empty: Iterable[str] = ()) -> None:
        """Note the prompts of a mini-batch of a step. Never waits.

        Args:
            step: The step, which is under way.
            trained: Prompts with trajectories in it.
            empty: Prompts without any.
        """
        used, unused = self._used.setdefault(step, (set(), set()))
        used.update(trained)
        unused.update(empty)

    def drop(self, uids: Iterable[str]) -> None:
        """Report prompts that the replay buffer has dropped: their groups are filtered. Waits for the broker."""
        if self._loop is not None and self._training is not None:
            self._loop.run(self._training.settle((), sorted(uids)))

    def finish(self, step: int) -> None:
        """Settle the groups of all steps up to this one. Waits for the broker.

        Raises:
            ConsumerFencedError: Another process has taken the place of this trainer.
        """
        for number in sorted(self._used):
            if number <= step and self._loop is not None and self._training is not None:
                used, unused = self._used[number]
                version = PolicyVersion(self._incarnation, number)
                self._loop.run(self._training.settle(sorted(used), sorted(unused - used), version))
                del self._used[number]

    def commit(self, step: int) -> None:
        """Report a durable checkpoint of a step: the broker may delete its groups. Blocks for at most `COMMIT_S`.

        Raises:
            RefusedError: The broker does not accept the commit.
        """
        if self._loop is None or self._training is None:
            return
        version = PolicyVersion(self._incarnation, step)
        try:
            self._loop.run(self._training.consumer.commit(version, timeout_s=COMMIT_S))
        except WaitTimeoutError as error:
            logger.warning("checkpoint not reported version=%s error=%s", version, error)

    def metrics(self) -> dict[str, float]:
        """Return the prompts without a whole group since the last call, by reason: the same names in every call."""
        counted = Counter[Missing]() if self._loop is None else self._loop.call(self._take_missing)
        return {f"bus/groups_{why}_total": float(counted[why]) for why in Missing}  # verl adds up a `total`

    def _take_missing(self) -> Counter[Missing]:
        counted, self._missing = self._missing, Counter()
        return counted

    def close(self) -> None:
        """Leave the bus; groups that are not settled return to the queue. Blocks. May be called twice."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        self._closing = True
        atexit.unregister(self.close)
        try:
            loop.run(self._stack.aclose())
        finally:
            loop.close()
            self._training = self._validation = None


def _log_failure(submitted: "Future[None]") -> None:
    if submitted.cancelled():
        return
    error = submitted.exception()
    if error is not None and not isinstance(error, ClosedError):
        logger.error("prompts not submitted", exc_info=error)


_open: list[Bridge] = []


def opened(bridge: Bridge) -> Bridge:
    """Make a bridge that of this process: verl hands its manager to neither replay buffer nor checkpoint callback."""
    _open[:] = [bridge]
    return bridge


def current() -> Bridge:
    """Return the bridge of this process.

    Raises:
        UsageError: There is none: verl has another agent loop manager.
    """
    if not _open:
        raise UsageError(
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class: must be BusAgentLoopManager of "
            "rolloutmq.trainer.integrations.verl.manager with this replay buffer (got another)"
        )
    return _open[0]
