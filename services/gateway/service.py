"""The gateway's operations, one for each of Atropos' endpoints. `app` has the HTTP part, `registry` the claims.

A request to `/scored_data` is answered once the broker has its groups. The gateway asks the broker for all shared
state. It owns only the registrations, written to disk before the reply, and the posts in doubt (`in_doubt`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.errors import BrokerUnavailableError, GroupTooLargeError, RefusedError, RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import Disconnect, LatestExample, LatestExampleReply, Reset, StatusReply
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import InfoReply
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.services.gateway.atropos_wire import RefusedBodyError, RegisterEnv, Registration
from rolloutmq.services.gateway.batch_server import BatchOffer, BatchServer, registration_of
from rolloutmq.services.gateway.broker_status import FRESH_S, BrokerStatus
from rolloutmq.services.gateway.group_mapping import PostedGroup
from rolloutmq.services.gateway.in_doubt import InDoubt, Post
from rolloutmq.services.gateway.producers import EnvProducer, EnvProducers, NoRoomError
from rolloutmq.services.gateway.registry import Environment, Registry, RegistryState
from rolloutmq.services.process.lock import only_one

logger = logging.getLogger(__name__)

SWEEP_S: Final = 1.0
"""Interval of the search for environments that left."""
RESET_S: Final = 10.0
INFO_S: Final = 2.0
"""Polling interval of clients that wait for a trainer."""
WAIT_FOR_TRAINER: Final = {"status": "wait for trainer to start"}


class Gateway:
    """Gateway of one run. Create it with `opened`."""

    def __init__(self, layout: RunLayout, config: GatewayConfig, watch: BrokerStatus) -> None:
        self.watch = watch
        self.config = config
        book = read_json(layout.registrations, RegistryState) or RegistryState()
        self.registry = Registry(book, config.absent_s, time.monotonic())
        self.posted_groups = 0
        """Groups accepted in this life of the gateway."""
        self.in_doubt = InDoubt(layout.doubts, time.monotonic())
        self._layout = layout
        self._producers = EnvProducers(layout.root, self.registry)
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
    async def opened(cls, layout: RunLayout, config: GatewayConfig) -> AsyncIterator["Gateway"]:
        """Restore the registrations; on exit give back the undelivered batch.

        Raises:
            RunDirInUseError: Another gateway serves the run.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(only_one(layout.root / "gateway.lock", "gateway"))
            watch = await stack.enter_async_context(BrokerStatus(layout.root))
            made = cls(layout, config, watch)
            stack.push_async_callback(made._close)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            own = (
                tasks.create_task(made._sweep(), name="sweep"),
                tasks.create_task(made._register_again(), name="registration of the trainer"),
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
            for env in self.registry.here():
                producer = self._producers.get(env.lane)
                if producer is not None and producer.busy:
                    self.registry.hear(env, time.monotonic())
            for env in self.registry.vanished(time.monotonic()):
                logger.info("environment vanished name=%s", env.wandb_name)
                await self._let_go(env)

    # The trainer

    async def register(self, trainer: Registration) -> dict[str, Any]:
        """Start a run; with the settings of the present one, resume it."""
        if trainer.batch_size < 1:
            raise RefusedBodyError(("body", "batch_size"), "must be at least 1")
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
        return {"uuid": uuid.uuid4().int}

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

    async def info(self) -> dict[str, Any]:
        """Return batch size and longest sequence; -1 before a registration."""
        trainer = self.registry.book.trainer or await self._trainer()
        if trainer is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len}

    def wandb_info(self) -> dict[str, Any]:
        """Return group and project; None before a registration."""
        trainer = self.registry.book.trainer
        if trainer is None:
            return {"group": None, "project": None}
        return {"group": trainer.wandb_group, "project": trainer.wandb_project}

    async def status(self) -> dict[str, Any]:
        """Return the step and the number of queued groups."""
        status = await self.watch.refresh()
        queued = status.pressure.queued_groups if status is not None else 0
        here = self._producers.waiting_groups() + len(self._batches.held())
        return {"current_step": self.step(status), "queue_size": queued + here}

    def step(self, status: StatusReply | None) -> int:
        """Return the step: batches delivered here, or the step of a trainer on the bus."""
        if self.registry.book.trainer is None and status is not None:
            return status.pressure.step
        return self.registry.book.step

    async def _trainer(self) -> Registration | None:
        """Return the trainer shown to environments: the one registered here, or one on the bus."""
        book = self.registry.book
        if book.trainer is not None:
            return book.trainer if book.started else None
        try:
            reply = await self.watch.request(GetInfo(), INFO_S)
        except BrokerUnavailableError:
            return None
        if not isinstance(reply, InfoReply) or not reply.info.started:
            return None
        return registration_of(reply.info)

    # Environments

    async def register_env(self, asked: RegisterEnv) -> dict[str, Any]:
        """Register an environment, once the trainer has started."""
        async with self._turn:
            trainer = await self._trainer()
            if trainer is None:
                return dict(WAIT_FOR_TRAINER)
            env = self.registry.enrol(asked, time.monotonic())
            self._write()
            logger.info("environment registered name=%s id=%d", env.wandb_name, env.env_id)
            return {
                "status": "success",
                "env_id": env.env_id,
                "wandb_name": env.wandb_name,
                "checkpoint_dir": trainer.checkpoint_dir,
                "starting_step": self.step(self.watch.status),
                "checkpoint_interval": trainer.save_checkpoint_interval,
                "num_steps": trainer.num_steps,
            }

    async def disconnect_env(self, env_id: int) -> dict[str, Any]:
        """Exclude an environment from the weights until its next request."""
        env = self.registry.find(env_id)
        if env is None:
            return {"status": "failure", "error": f"env_id: no environment is registered (got {env_id})"}
        self.registry.leave(env)
        await self._let_go(env)
        return {"status": "success"}

    async def status_env(self, env_id: int) -> dict[str, Any]:
        """Return the pacing information of an environment.

        Raises:
            RefusedBodyError: No environment has that id.
        """
        env = self._environment(env_id, 404)
        self.registry.hear(env, time.monotonic())
        status = await self._state_for(env)
        batch = status.pressure.batch_sequences if status is not None else 0
        return self.registry.standing(env, self.queued(status), self.step(status), batch)

    async def _state_for(self, env: Environment) -> StatusReply | None:
        """Return the status as an environment must see it: with its own groups, and the queue of the current step.

        Posts of others and deliveries in the meantime cause no wait: their groups are added here.
        """
        own = self._producers.get(env.lane)
        posted_at = own.settled_at if own is not None else float("-inf")
        since = max(posted_at, self._batches.leased_at, self._changed_at, time.monotonic() - FRESH_S)
        return await self.watch.refresh(since)

    def _queue_changed(self) -> None:
        """Record a change that every later status must include."""
        self._changed_at = time.monotonic()
        self.watch.look()

    def queued(self, status: StatusReply | None) -> dict[str, int]:
        """Return the queued sequences by lane: at the broker, in flight or acked since, and not yet delivered."""
        lanes = status.pressure.lanes if status is not None else ()
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

    async def _let_go(self, env: Environment) -> None:
        """Release the claims of an environment; its queued groups are still trained."""
        producer = self._producers.get(env.lane)
        if producer is None:
            return
        await producer.close()
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


class NotRegisteredError(Exception):
    """A batch was requested without a registered trainer."""
