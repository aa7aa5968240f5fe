"""The gateway's operations, one for each of Atropos' endpoints. `app` has the HTTP part, `registry` the claims.

A request to `/scored_data` is answered once the broker has its groups. The gateway asks the broker for all shared
state. It owns only the registrations, written to disk before the reply, and the posts in doubt (`in_doubt`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    DamagedFileError,
    GroupTooLargeError,
    RefusedError,
    RetryableError,
    RolloutMQError,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import Disconnect, LatestExample, LatestExampleReply, Reset, StatusReply
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import InfoReply, RunInfo
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.services.gateway.atropos_replies import (
    Disconnected,
    DisconnectFailed,
    EnvRegistered,
    EnvStatus,
    Info,
    Status,
    TrainerRegistered,
    WaitForTrainer,
    WandbInfo,
)
from rolloutmq.services.gateway.atropos_wire import RefusedBodyError, RegisterEnv, Registration
from rolloutmq.services.gateway.batch_server import BatchOffer, BatchServer, registration_of
from rolloutmq.services.gateway.broker_status import FRESH_S, BrokerStatus
from rolloutmq.services.gateway.group_mapping import PostedGroup
from rolloutmq.services.gateway.in_doubt import InDoubt, Post, digest_of
from rolloutmq.services.gateway.producers import EnvProducer, EnvProducers, NoRoomError, most_open
from rolloutmq.services.gateway.registry import Environment, RegisterProgram, Registry, RegistryState
from rolloutmq.services.process.descriptors import raise_descriptor_limit
from rolloutmq.services.process.lock import only_one
from rolloutmq.services.programs.beats import Programs

logger = logging.getLogger(__name__)

SWEEP_S: Final = 1.0
"""Interval of the search for environments that left."""
RESET_S: Final = 10.0
INFO_S: Final = 2.0
"""Longest wait for the run's description in a request that its client repeats until there is a trainer."""


class Gateway:
    """Gateway of one run. Create it with `opened`."""

    def __init__(
        self,
        layout: RunLayout,
        config: GatewayConfig,
        watch: BrokerStatus,
        environments: Mapping[str, EnvironmentConfig],
    ) -> None:
        self.watch = watch
        self.config = config
        book = registrations_of(layout.registrations)
        self.registry = Registry(book, config.absent_s, time.monotonic())
        self.posted_groups = 0
        """Groups accepted in this life of the gateway."""
        self.in_doubt = InDoubt(layout.doubts, time.monotonic())
        self._layout = layout
        self._producers = EnvProducers(layout.root, self.registry, most_open())
        programs = {name: env for name, env in environments.items() if env.command}
        registered = {env.worker for env in book.environments if env.worker}
        self.programs = Programs(layout, programs, watch.request, self._release, registered)
        self._batches = BatchServer(layout.root, lambda: self.in_doubt.went, self.in_doubt.settled)
        self._latest: Group | None = None
        self._unregistered = asyncio.Event()
        self._unregistered.set()
        self._turn = asyncio.Lock()
        """Serializes registrations and resets."""
        self._changed_at = float("-inf")
        """Last change of the queue that every environment must see, monotonic."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        layout: RunLayout,
        config: GatewayConfig,
        environments: Mapping[str, EnvironmentConfig] = MappingProxyType({}),
    ) -> AsyncIterator["Gateway"]:
        """Restore the registrations; on exit give back the undelivered batch.

        Raises:
            DamagedFileError: The registrations of an earlier life cannot be read.
            RunDirInUseError: Another gateway serves the run.
        """
        async with AsyncExitStack() as stack:
            raise_descriptor_limit()
            stack.enter_context(only_one(layout.root / "gateway.lock", "gateway"))
            watch = await stack.enter_async_context(BrokerStatus(layout.root))
            made = cls(layout, config, watch, environments)
            stack.push_async_callback(made._close)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            own = (
                tasks.create_task(made._sweep(), name="sweep"),
                tasks.create_task(made._register_again(), name="registration of the trainer"),
                tasks.create_task(made.programs.run(), name="programs"),
            )
            try:
                yield made
            finally:
                for task in own:
                    task.cancel()

    async def _close(self) -> None:
        await self._batches.close()
        await self._producers.close()
        self.in_doubt.close()

    async def _register_again(self) -> None:
        """Register the trainer again after a restart, or after a failed reset, as often as needed."""
        while True:
            await self._unregistered.wait()
            self._unregistered.clear()
            if self.registry.book.trainer is not None:
                await (
                    self.watch.connected()
                )  # before its turn: environments must not wait for this without a limit
            await self._go_on()

    async def _go_on(self) -> None:
        """Register the recorded trainer; a step that only the broker knows counts."""
        async with self._turn:
            book = self.registry.book
            if book.trainer is None:
                return
            await self.watch.connected()
            status = await self.watch.refresh()
            settled = status.pressure.step if status is not None else 0
            book.step = max(book.step, settled)
            # The last batch left, but its settlement was lost: its groups return for the same step, and are settled.
            unsettled = settled == book.step - 1
            try:
                await self._batches.open(book.trainer, settled if unsettled else book.step)
            except RolloutMQError as error:  # environments continue; the trainer may register again
                logger.error("trainer not registered again error=%s", error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._batches.keep()
            self.in_doubt.forget_old(time.monotonic())
            unknown = self.watch.status is None  # their requests are being held
            for env in self.registry.here():
                producer = self._producers.get(env)
                if unknown or (producer is not None and producer.busy):
                    self.registry.hear(env, time.monotonic())
            for env in self.registry.vanished(time.monotonic()):
                logger.info("environment vanished name=%s", env.wandb_name)
                await self._let_go(env)
            await self._producers.drop_forgotten()

    # The trainer

    async def register(self, trainer: Registration) -> TrainerRegistered:
        """Start a run; with the settings of the present one, resume it."""
        async with self._turn:
            book = self.registry.book
            if book.trainer != trainer or not self._batches.is_open:
                if book.trainer not in (None, trainer):
                    logger.info("another run started, queue discarded")
                    await self._reset("another run was registered")
                    book.started = False
                step = book.step if book.trainer == trainer else trainer.starting_step
                await self._batches.open(trainer, step)
                book.trainer, book.step = trainer, step
                self._write()
                self._queue_changed()  # minimum shares depend on the batch size
        return TrainerRegistered(uuid=uuid.uuid4().int)

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[BatchOffer | None]:
        """Yield the next batch, or None; it counts as delivered once complete.

        Raises:
            NotRegisteredError: No trainer has registered.
        """
        book = self.registry.book
        if book.trainer is None:
            raise NotRegisteredError
        if not book.started:
            book.started = True
            self._write()
        async with self._batches.next() as offer:
            if offer is not None:
                self.watch.look()  # a request after the delivery then need not wait for the status
            yield offer
            if offer is not None and offer.delivered:
                self.in_doubt.hand_out(group.group_id for group in offer.batch.groups)
                book.step += 1
                try:
                    self._write()
                except OSError as error:  # the batch was delivered nevertheless
                    logger.error("step not recorded step=%d error=%s", book.step, error)

    async def info(self) -> Info:
        """Return batch size and longest sequence; -1 before a registration.

        An environment asks once and ends at a batch size of -1, so the reply waits for the broker.

        Raises:
            BrokerUnavailableError: The sizes are unknown: the broker has not replied for `gateway.post_wait_s`.
        """
        trainer, until = self.registry.book.trainer, time.monotonic() + self.config.post_wait_s
        if trainer is None:
            status = await self._known()
            if (run := await self._run(until - time.monotonic())).started:
                trainer = registration_of(run, status.pressure.batch_sequences)
        return Info(batch_size=trainer.batch_size, max_token_len=trainer.max_token_len) if trainer else Info()

    async def wandb_info(self) -> WandbInfo:
        """Return group and project: those of the trainer registered here, else those of the run.

        Environments wait until the project is known, and open their W&B run with it once and for all. So it is unknown
        while a trainer may still name another one: before a trainer has registered, unless the configuration has one.
        """
        trainer = self.registry.book.trainer
        if trainer is not None:
            return WandbInfo(group=trainer.wandb_group, project=trainer.wandb_project)
        try:
            run = await self._run(INFO_S)
        except BrokerUnavailableError:
            return WandbInfo()  # its client asks again
        if not (run.started or run.tracking_project):
            return WandbInfo()
        # A trainer on the bus need not name a project, and W&B accepts no empty name.
        return WandbInfo(group=run.tracking_group or None, project=run.tracking_project or run.run)

    async def status(self) -> Status:
        """Return the step and the number of queued groups.

        Raises:
            BrokerUnavailableError: They are unknown: the broker has not replied for `gateway.post_wait_s`.
        """
        status = await self._known()
        here = self._producers.waiting_groups() + len(self._batches.held())
        return Status(current_step=self._step(status), queue_size=status.pressure.queued_groups + here)

    async def _known(self, since: float | None = None) -> StatusReply:
        """Return the broker's status. The first one is waited for: a queue size of 0 would start all workers."""
        return await self.watch.known(since, wait_s=self.config.post_wait_s)

    def step(self, status: StatusReply | None) -> int | None:
        """Return the step, None while only an absent broker knows it."""
        if status is not None:
            return self._step(status)
        return self.registry.book.step if self.registry.book.trainer is not None else None

    def _step(self, status: StatusReply) -> int:
        """Return the step: batches delivered here, or the step of a trainer on the bus."""
        book = self.registry.book
        return book.step if book.trainer is not None else status.pressure.step

    async def _trainer(self) -> Registration | None:
        """Return the started trainer shown to environments: the one registered here, or one on the bus."""
        book = self.registry.book
        if book.trainer is not None:
            return book.trainer if book.started else None
        try:
            run = await self._run(INFO_S)
        except BrokerUnavailableError:
            return None
        return registration_of(run) if run.started else None

    async def _run(self, wait_s: float) -> RunInfo:
        """Return the broker's description of the run.

        Raises:
            BrokerUnavailableError: No reply for `wait_s`.
        """
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            with suppress(BrokerUnavailableError):
                reply = await self.watch.request(GetInfo(), min(INFO_S, left_s))
                if isinstance(reply, InfoReply):
                    return reply.info
            await self.watch.refresh()  # leaves a dead broker for its successor
        raise BrokerUnavailableError(str(self._layout.root), wait_s)

    # Environments

    async def register_env(self, asked: RegisterEnv) -> EnvRegistered | WaitForTrainer:
        """Register an environment, once the trainer has started.

        Raises:
            BrokerUnavailableError: The step is unknown: the broker has not replied for `gateway.post_wait_s`.
            EnvironmentsFullError: The broker can take no further environment now.
        """
        # The broker is asked before the turn: many register at once, and would wait for one answer after the other.
        asked_at = time.monotonic()
        await self._known(asked_at)
        trainer = await self._trainer()
        async with self._turn:
            if self.registry.book.trainer is not None or self._changed_at > asked_at:
                trainer = await self._trainer()
            if trainer is None:
                return WaitForTrainer()
            status = await self._known(max(asked_at, self._changed_at))
            self._require_lane(asked, status)
            env = self.registry.enrol(asked, time.monotonic())
            self._write()
            logger.info("environment registered name=%s id=%d", env.wandb_name, env.env_id)
            return EnvRegistered(
                env_id=env.env_id,
                wandb_name=env.wandb_name,
                checkpoint_dir=trainer.checkpoint_dir,
                starting_step=self._step(status),
                checkpoint_interval=trainer.save_checkpoint_interval,
                num_steps=trainer.num_steps,
            )

    def _require_lane(self, asked: RegisterEnv, status: StatusReply) -> None:
        """Raise EnvironmentsFullError unless the broker can open a lane; that of a worker's environment is its own."""
        if isinstance(asked, RegisterProgram):
            return
        lanes = status.pressure.lanes
        used = {lane.env for lane in lanes if lane.producers or lane.queued_groups or lane.leased_groups}
        if self.registry.crowded(status.pressure.free_environments, used):
            raise EnvironmentsFullError(len(lanes))

    async def disconnect_env(self, env_id: int) -> Disconnected | DisconnectFailed:
        """Exclude an environment from the weights until its next request."""
        env = self.registry.find(env_id)
        if env is None:
            return DisconnectFailed(error=f"env_id: no environment is registered (got {env_id})")
        self.registry.leave(env)
        await self._let_go(env)
        return Disconnected()

    async def status_env(self, env_id: int) -> EnvStatus:
        """Return the pacing information of an environment.

        Raises:
            RefusedBodyError: No environment has that id.
            BrokerUnavailableError: It is unknown: the broker has not replied for `gateway.post_wait_s`.
        """
        env = self._environment(env_id, 404)
        self.registry.hear(env, time.monotonic())
        status = await self._state_for(env)
        return self.registry.standing(
            env, self.queued(status), self._step(status), status.pressure.batch_sequences
        )

    async def _state_for(self, env: Environment) -> StatusReply:
        """Return the status as an environment must see it: with its own groups, and the queue of the current step.

        Posts of others and deliveries in the meantime cause no wait: their groups are added here.
        """
        own = self._producers.get(env)
        posted_at = own.settled_at if own is not None else float("-inf")
        since = max(posted_at, self._batches.leased_at, self._changed_at, time.monotonic() - FRESH_S)
        return await self._known(since)

    def _queue_changed(self) -> None:
        """Record a change that every later status must include."""
        self._changed_at = time.monotonic()
        self.watch.look()

    def queued(self, status: StatusReply) -> dict[str, int]:
        """Return the queued sequences by lane: at the broker, in flight or acked since, and not yet delivered."""
        lanes = status.pressure.lanes
        queued = {lane.env: lane.queued_sequences for lane in lanes if lane.split is Split.TRAIN}
        for group in self._batches.held():
            queued[group.env] = queued.get(group.env, 0) + group.sequences
        for name, sequences in self._producers.sequences_since(self.watch.asked_at).items():
            queued[name] = queued.get(name, 0) + sequences
        return queued

    async def take(self, posted: PostedGroup, gone: asyncio.Event) -> Post:
        """Return when the broker has all groups; the sender of the reply ends the post.

        Args:
            posted: Groups of the request. A client without a reply sends the same bytes again.
            gone: Set when the client is gone.

        Raises:
            RefusedBodyError: A group names an unregistered environment; none was accepted.
            GroupTooLargeError: A group can never be sent; none was accepted.
            NoRoomError: There was no room in time; accepted groups, if any, are recognized when sent again.
        """
        environments = [
            self._environment(env_id, 422) if env_id is not None else None for env_id in posted.env_ids
        ]
        post = await self.in_doubt.begin(posted.digest, len(posted.groups), gone, time.monotonic())
        try:
            await self._send(posted.groups, environments, post)
        except (RefusedBodyError, GroupTooLargeError, NoRoomError):
            (self.in_doubt.leave if post.came else self.in_doubt.end)(post)
            raise
        except BaseException:
            self.in_doubt.leave(post)
            raise
        return post

    async def _send(
        self, groups: Sequence[Group], environments: Sequence[Environment | None], post: Post
    ) -> None:
        by_producer: dict[EnvProducer, list[Group]] = {}
        for made, env, group_id in zip(groups, environments, post.ids, strict=True):
            group = replace(made, group_id=group_id)
            if group_id not in post.came:
                by_producer.setdefault(self._producers.of(env), []).append(group)
            if env is not None:
                self.registry.hear(env, time.monotonic())
                self.registry.saw(env, group.sequences)
        if sum(map(len, by_producer.values())) > 1:  # a single group is checked when sent
            for producer, groups in by_producer.items():
                await producer.require_sendable(groups, post.gone, self.config.post_wait_s)
        for producer, groups in by_producer.items():
            await producer.deliver(groups, post.gone, self.config.post_wait_s, self._came)

    def _came(self, group: Group) -> None:
        self.in_doubt.came([group.group_id])
        self.posted_groups += 1
        self._latest = group

    async def latest_example(self) -> Group | None:
        """Return the newest group, also from an earlier life."""
        if self._latest is None:
            try:
                self._latest = await self._stored_example()
            except (BrokerUnavailableError, RefusedError):
                return None
        return self._latest

    async def _stored_example(self) -> Group | None:
        reply, frames = await self.watch.request_frames(LatestExample(), RESET_S)
        if not isinstance(reply, LatestExampleReply) or reply.header is None:
            return None
        table = codec.decode_table(reply.table)
        return codec.decode_group(reply.header, table, frames, reply.env)

    def _environment(self, env_id: int, status: int) -> Environment:
        env = self.registry.find(env_id)
        if env is None:
            reason = f"no environment is registered with the id {env_id}"
            raise RefusedBodyError(("body", "env_id"), reason, status, kind="unknown_env")
        return env

    async def _release(self, worker: str) -> None:
        """Release the claims of a worker that has delivered everything, or ended."""
        env = self.registry.of_worker(worker)
        if env is not None:
            self.registry.leave(env)
            await self._let_go(env)

    async def _let_go(self, env: Environment) -> None:
        """Release the claims of an environment; its queued groups are still trained."""
        producer = self._producers.get(env)
        if producer is None:
            return
        await producer.close()
        if env.worker:
            return  # its lane is that of other workers, too
        try:
            await self.watch.request(Disconnect(env=env.lane), RESET_S)
        except RolloutMQError as error:
            logger.warning("environment still counts at the broker name=%s error=%s", env.wandb_name, error)

    # Everything

    async def reset_data(self) -> None:
        """Forget the run and all registrations; environment numbers are not reused."""
        async with self._turn:
            await self._reset("reset_data")
            self.registry.forget()
            self._latest = None
            self._write()

    async def _reset(self, why: str) -> None:
        # Close all clients first: a survivor would register again, with the earlier step or minimum share.
        await self._batches.close()
        await self._producers.close()
        try:
            await self.watch.request(Reset(reason=why), RESET_S)
        except BaseException:
            self._unregistered.set()  # unchanged
            raise
        self.in_doubt.forget_batches()
        self._queue_changed()

    def _write(self) -> None:
        write_json(self._layout.registrations, self.registry.book)

    # Workers of the run that are programs

    def program(self, worker: str, asked: RegisterEnv) -> RegisterProgram:
        """Return the registration of a worker: the claims are those of its section, whatever the program asks for."""
        life = self.programs.find(worker)
        assert life is not None, "the request was refused otherwise"
        section = life.section
        if asked.group_size != section.group_size:
            logger.warning(
                "group_size of environment.%s is %d, but worker %s registers %d",
                *(life.env, section.group_size, worker, asked.group_size),
            )
        return RegisterProgram(
            max_token_length=asked.max_token_length,
            desired_name=asked.desired_name,
            weight=section.weight,
            group_size=asked.group_size,
            min_batch_allocation=section.min_share or None,
            worker=worker,
            lane=life.env,
        )

    async def paced(self, env_id: int, gone: asyncio.Event) -> EnvStatus:
        """Return the reply to `/status-env`; a draining program waits for it until it has delivered everything."""
        env = self._environment(env_id, 404)
        life = await self.programs.hold(env.worker, gone) if env.worker else None
        answer = await self.status_env(env_id)
        if life is not None:
            batch = self.watch.status.pressure.batch_sequences if self.watch.status is not None else 0
            size = self.registry.group_size(env)
            life.spoke = life.spoke or not life.draining
            if life.draining:
                full = max(answer.queue_size, life.enough(batch, size))
                answer = msgspec.structs.replace(answer, queue_size=full)
            life.told(answer.queue_size, batch, size, time.monotonic())
        return answer

    def signed(self, posted: PostedGroup, worker: str) -> PostedGroup:
        """Return a worker's post with its environment, also if it names none; it is no other's with equal groups."""
        env = self.registry.of_worker(worker)
        if env is None:
            life = self.programs.find(worker)
            assert life is not None, "the request was refused otherwise"
            size = life.section.group_size
            asked = RegisterEnv(max_token_length=0, desired_name=worker, weight=1.0, group_size=size)
            env = self.registry.enrol(self.program(worker, asked), time.monotonic())
            self._write()
        env_ids = [env.env_id if env_id is None else env_id for env_id in posted.env_ids]
        return posted._replace(env_ids=env_ids, digest=digest_of(posted.digest + worker.encode()))

    @contextmanager
    def posting(self, posted: PostedGroup) -> Iterator[None]:
        """Count a post of a worker while it is in progress, and its groups once they are accepted."""
        env = self.registry.find(posted.env_ids[0]) if posted.env_ids[0] is not None else None
        life = self.programs.find(env.worker) if env is not None and env.worker else None
        if life is None:
            yield
            return
        post, accepted = life.begin(time.monotonic()), 0
        try:
            yield
            accepted = len(posted.groups)
        finally:
            life.end(post, accepted, time.monotonic())


def registrations_of(path: Path) -> RegistryState:
    """Return the registrations of an earlier life; none without a file.

    Raises:
        DamagedFileError: The file does not decode. Its step and its environment numbers must not be used twice.
    """
    try:
        return read_json(path, RegistryState) or RegistryState()
    except msgspec.DecodeError as error:
        problem = f"{error}; move the file away, and let trainer and environments register anew"
        raise DamagedFileError(str(path), 1, problem) from None


class EnvironmentsFullError(RetryableError):
    """As many environments are present as the broker can take."""

    def __init__(self, known: int) -> None:
        self.known = known

    def __str__(self) -> str:
        return (
            f"environments: no room for another one (got {self.known}); end some of them, or register later"
        )


class NotRegisteredError(Exception):
    """A batch was requested without a registered trainer."""
