"""The bridge: asks the bus for the groups of verl's prompts, puts them into TransferQueue, and reports their outcome.

    submit -> running -> a worker answers the task -> trajectories in TransferQueue -> finished
    a step uses them -> `finish` settles their groups -> `commit` with the checkpoint

TransferQueue keeps nothing beyond its process. So a group is settled only once a step has used it, and the broker
delivers again what a killed trainer had put and not used, or used after its checkpoint. Nothing is raised for a single
prompt: a group that failed, is late or lost makes its prompt a `failure`, which verl's replay buffer replaces.

The bridge works in the thread of its connection, so puts go on while a training step blocks.
"""

import asyncio
import atexit
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolloutmq.schemas.errors import ClosedError, ConfigError, UsageError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.integrations.checkpoints import next_life
from rolloutmq.trainer.integrations.judgement import Judge
from rolloutmq.trainer.integrations.task_feed.answers import Missing
from rolloutmq.trainer.integrations.task_feed.connection import FeedConnection, find_problem
from rolloutmq.trainer.integrations.task_feed.feed import Feed
from rolloutmq.trainer.integrations.verl.prompts import Prompt, content_key
from rolloutmq.trainer.integrations.verl.rows import Status, trajectories

logger = logging.getLogger(__name__)


class Store(Protocol):
    """What the bridge writes to, see `store.TransferQueueStore`."""

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        fields: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write tags, and fields if given. Blocks. Raises ClosedError once the trainer has closed the store."""


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
    def of(cls, given: object) -> "BusOptions":
        """Return the options of `bus` in verl's configuration, which are not typed.

        Raises:
            ConfigError: A key is unknown, missing, of another type or out of range; names it.
        """
        if not isinstance(given, Mapping | None):
            raise ConfigError("bus", f"must be a group of settings (got {given!r}); add +bus.where=...")
        given = dict(given or {})
        known = set(cls.__slots__)
        for key in given:
            if key not in known:
                raise ConfigError(f"bus.{key}", f"unknown key; allowed: {', '.join(sorted(known))}")
        where, environment = given.get("where"), given.get("environment", "")
        if not (isinstance(where, str) and where):
            raise ConfigError(
                "bus.where",
                f"must be a run directory or a broker's address (got {where!r}); add +bus.where=...",
            )
        if not isinstance(environment, str):
            raise ConfigError(
                "bus.environment", f"must be the name of an environment of the run (got {environment!r})"
            )
        if given.get("environments") is None:
            given.pop("environments", None)
        made = cls(**given)
        if not (made.environment or made.environments):
            raise ConfigError("bus.environment", "must name an environment of the run (got none)")
        problem = find_problem(made.name, made.environments, made.deadline_s, made.timeout_s)
        if problem is not None:
            raise ConfigError(f"bus.{problem[0]}", problem[1])
        return made

    def environment_of(self, prompt: Prompt) -> str:
        """Return the environment of a prompt."""
        return self.environments.get(_source(prompt), self.environment) or _source(prompt)

    def require_known(self, prompts: Iterable[Prompt], known: Collection[str]) -> None:
        """Check the environments of the settings and of prompts.

        Args:
            prompts: The prompts.
            known: Environments of the run; none means any.

        Raises:
            ConfigError: The run has no such environment; names the setting, and the environments there are.
        """
        named = {f"bus.environments.{source}": name for source, name in self.environments.items()}
        if self.environment:
            named["bus.environment"] = self.environment
        else:
            for source in {_source(prompt) for prompt in prompts} - {*self.environments}:
                named[f"bus.environments.{source}"] = source
        for key, name in named.items():
            if known and name not in known:
                raise ConfigError(key, f"must be one of {', '.join(sorted(known))} (got {name})")


def _source(prompt: Prompt) -> str:
    return str(prompt.fields.get("data_source", ""))


@dataclass
class Bridge:
    """Groups of the bus in TransferQueue. For one trainer; all calls come from its thread.

    Attributes:
        options: Settings of the bus.
        store: What the groups are put into.
        info: Description of the run; `batch_sequences` is required.
        temperature: `actor_rollout_ref.rollout.temperature`, at which verl scores. Groups of another one are failures.
        checkpoints: Folder of the trainer's checkpoints, which counts its lives if the run is not on this machine.
        connection: Connection to the bus.
    """

    options: BusOptions
    store: Store
    info: RunInfo
    checkpoints: str
    temperature: float = 1.0
    _incarnation: int = 0
    _used: dict[int, tuple[set[str], set[str]]] = field(default_factory=dict)
    """Prompts of each step that is not settled: those with trajectories, and those without."""
    _missing: Counter[Missing] = field(default_factory=Counter)
    _closing: bool = False
    _checked: set[str] = field(default_factory=set)
    """Partitions whose first prompts have environments that the run has."""

    def __post_init__(self) -> None:
        self.connection = FeedConnection(
            self.options.where,
            name=self.options.name,
            batch_sequences=self.info.batch_sequences,
            deadline_s=self.options.deadline_s,
            timeout_s=self.options.timeout_s,
        )

    # Prompts

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Ask for the groups of prompts, and return at once. The first call joins the bus, and waits for the broker.

        Raises:
            ConfigError: The run has no such environment.
            WaitTimeoutError: There is no broker; tells where it was looked for.
            RefusedError: The broker does not accept this trainer.
        """
        if not prompts:
            return
        validates, partition = prompts[0].validates, prompts[0].partition
        if partition not in self._checked:
            self.options.require_known(prompts, self.connection.environments())
            self._checked.add(partition)
        if not validates and not self.connection.joined:
            self._join(prompts[0].step - 1)
        feed = self.connection.run(self.connection.evaluation()) if validates else self.connection.training
        self.connection.future(self._submitted(feed, prompts)).add_done_callback(_log_failure)

    def _join(self, step: int) -> None:
        self._incarnation = next_life(self.options.where, self.checkpoints, "trainer.default_local_dir")
        version = PolicyVersion(self._incarnation, step)
        judge = Judge("verl", self.temperature, "actor_rollout_ref.rollout.temperature")
        self.connection.join(version, self.info, content_key, judge.find_fault)
        atexit.register(self.close)
        logger.info("joined the bus incarnation=%d step=%d", version.incarnation, version.step)

    async def _submitted(self, feed: Feed, prompts: Sequence[Prompt]) -> None:
        await self._tag(prompts, Status.RUNNING)
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(self._answered(feed, prompt))

    async def _answered(self, feed: Feed, prompt: Prompt) -> None:
        """Put the group of a prompt, then its status; never raises."""
        try:
            status = await self._outcome(feed, prompt)
            if self._closing:
                return
            await self._tag([prompt], status)
            if prompt.validates:
                await self.connection.evaluated()
        except ClosedError as error:  # the group stays with the broker
            logger.info("answer after the end uid=%s reason=%s", prompt.uid, error)
        except Exception:
            logger.exception("status not reported uid=%s", prompt.uid)

    async def _outcome(self, feed: Feed, prompt: Prompt) -> Status:
        """Put the group of a prompt; return the status of the prompt. Raises ClosedError."""
        try:
            return await self._put(feed, prompt)
        except ClosedError:
            raise
        except Exception:  # the trainer does not end for one prompt
            logger.exception("prompt without trajectories uid=%s", prompt.uid)
            return Status.FAILURE

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

    def groups_of(self, step: int) -> list[str]:
        """Return the ids of the groups that a step uses, if it is under way."""
        used, _ = self._used.get(step, (set[str](), set[str]()))
        if not used or not self.connection.joined:
            return []
        return self.connection.call(lambda: self.connection.training.group_ids(sorted(used)))

    def drop(self, uids: Iterable[str]) -> None:
        """Report prompts that the replay buffer has dropped: their groups are filtered. Waits for the broker."""
        if self.connection.joined:
            self.connection.run(self.connection.training.settle((), sorted(uids)))

    def finish(self, step: int) -> None:
        """Settle the groups of all steps up to this one. Waits for the broker.

        Raises:
            ConsumerFencedError: Another process has taken the place of this trainer.
        """
        for number in sorted(self._used):
            if number <= step and self.connection.joined:
                used, unused = self._used[number]
                version = PolicyVersion(self._incarnation, number)
                settling = self.connection.training.settle(sorted(used), sorted(unused - used), version)
                self.connection.run(settling)
                del self._used[number]

    def commit(self, step: int) -> None:
        """Report a durable checkpoint of a step: the broker may delete its groups. Blocks for at most a minute.

        Raises:
            RefusedError: The broker does not accept the commit.
        """
        if self.connection.joined:
            self.connection.commit(PolicyVersion(self._incarnation, step))

    def metrics(self) -> dict[str, float]:
        """Return the prompts without a whole group since the last call, by reason: the same names in every call."""
        counted = self.connection.call(self._take_missing) if self.connection.joined else Counter[Missing]()
        return {f"bus/groups_{why}_total": float(counted[why]) for why in Missing}  # verl adds up a `total`

    def _take_missing(self) -> Counter[Missing]:
        counted, self._missing = self._missing, Counter()
        return counted

    def close(self) -> None:
        """Leave the bus; groups that are not settled return to the queue. Blocks. May be called twice."""
        self._closing = True
        atexit.unregister(self.close)
        self.connection.close()


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
