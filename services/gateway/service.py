"""What the gateway does for each of Atropos' endpoints. HTTP is in `http`; the law of who may claim what in `registry`.

A request for `/scored_data` is answered when the broker has its groups. Whatever the broker knows, the gateway asks it
for; the only state of its own are the registrations, which are written down before they are answered, and the posts
that may not have been answered, of which `doubts` tells.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from rolloutmq.bus import codec
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.control import Disconnect, LatestExample, LatestExampleReply, Reset, StatusReply
from rolloutmq.schemas.delivery import GetInfo, InfoReply
from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.errors import BrokerUnavailableError, GroupTooLargeError, RefusedError, RolloutMQError
from rolloutmq.schemas.gateway import GatewayConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.trajectory import Group
from rolloutmq.services.gateway.contract import RefusedBodyError, RegisterEnv, Registration
from rolloutmq.services.gateway.doubts import Doubts, Post
from rolloutmq.services.gateway.handout import Handout, Offer, registration_of
from rolloutmq.services.gateway.outlet import NoRoomError, Outlet
from rolloutmq.services.gateway.outlets import Outlets
from rolloutmq.services.gateway.registry import Book, Environment, Registry
from rolloutmq.services.gateway.scored import Posted
from rolloutmq.services.gateway.watch import FRESH_S, Watch
from rolloutmq.services.lock import only_one

logger = logging.getLogger(__name__)

SWEEP_S: Final = 1.0
"""How often it is looked who has vanished."""
RESET_S: Final = 10.0
INFO_S: Final = 2.0
"""Who asks whether there is a trainer asks again."""
WAIT_FOR_TRAINER: Final = {"status": "wait for trainer to start"}


class Gateway:
    """One gateway of one run. Made by `opened`."""

    def __init__(self, layout: RunLayout, config: GatewayConfig, watch: Watch) -> None:
        self.watch = watch
        self.config = config
        book = read_json(layout.registrations, Book) or Book()
        self.registry = Registry(book, config.absent_s, time.monotonic())
        self.posted_groups = 0
        """Groups that were taken in this life of the gateway."""
        self.doubts = Doubts(layout.doubts, time.monotonic())
        self._layout = layout
        self._outlets = Outlets(layout.root, self.registry)
        self._handout = Handout(layout.root, lambda: self.doubts.went, self.doubts.settled)
        self._latest: Group | None = None
        self._unregistered = asyncio.Event()
        self._unregistered.set()
        self._turn = asyncio.Lock()
        """One registration or reset at a time."""
        self._changed_at = float("-inf")
        """When the queue last lost what every environment must know of, monotonic."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, layout: RunLayout, config: GatewayConfig) -> AsyncIterator["Gateway"]:
        """Go on with what is registered; leaving gives back what was not handed out.

        Raises:
            RunDirInUseError: Another gateway serves the run.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(only_one(layout.root / "gateway.lock", "gateway"))
            watch = await stack.enter_async_context(Watch(layout.root))
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
        await self._handout.close()
        await self._outlets.close()
        self.doubts.close()

    async def _register_again(self) -> None:
        """Register the trainer of an earlier life, or of before a reset that failed, whenever it has to be."""
        while True:
            await self._unregistered.wait()
            self._unregistered.clear()
            await self._go_on()

    async def _go_on(self) -> None:
        """Register the trainer of the book; a step that the broker knows and the book does not counts."""
        async with self._turn:
            book = self.registry.book
            if book.trainer is None:
                return
            await self.watch.connected()
            status = await self.watch.refresh()
            settled = status.pressure.step if status is not None else 0
            book.step = max(book.step, settled)
            # The last batch went, and its settlement died: its groups come for the same step, and are settled then.
            unsettled = settled == book.step - 1
            try:
                await self._handout.open(book.trainer, settled if unsettled else book.step)
            except RolloutMQError as error:  # others go on; the trainer may register again
                logger.error("the trainer could not be registered again error=%s", error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._handout.keep()
            self.doubts.forget_old(time.monotonic())
            for env in self.registry.here():
                outlet = self._outlets.get(env.lane)
                if outlet is not None and outlet.busy:
                    self.registry.hear(env, time.monotonic())
            for env in self.registry.vanished(time.monotonic()):
                logger.info("environment vanished name=%s", env.wandb_name)
                await self._let_go(env)

    # The trainer

    async def register(self, trainer: Registration) -> dict[str, Any]:
        """Begin a run; with the settings of the present one, go on with it."""
        if trainer.batch_size < 1:
            raise RefusedBodyError(("body", "batch_size"), "a batch has at least one sequence")
        async with self._turn:
            book = self.registry.book
            if book.trainer != trainer or not self._handout.is_open:
                if book.trainer not in (None, trainer):
                    logger.info("another run begins: what is queued is discarded")
                    await self._reset("another run was registered")
                    book.started = False
                step = book.step if book.trainer == trainer else trainer.starting_step
                await self._handout.open(trainer, step)
                book.trainer, book.step = trainer, step
                self._write()
                self._queue_changed()  # what counts as promised depends on the size of a batch
        return {"uuid": uuid.uuid4().int}

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[Offer | None]:
        """Yield the next batch, or None; it counts as handed out if it was delivered.

        Raises:
            NotRegisteredError: No trainer has registered.
        """
        book = self.registry.book
        if book.trainer is None:
            raise NotRegisteredError
        if not book.started:
            book.started = True
            self._write()
        async with self._handout.next() as offer:
            if offer is not None:
                self.watch.look()  # so that whoever asks when it has gone need not wait for the answer
            yield offer
            if offer is not None and offer.delivered:
                self.doubts.hand_out(group.group_id for group in offer.batch.groups)
                book.step += 1
                try:
                    self._write()
                except OSError as error:  # the batch went all the same
                    logger.error("the step cannot be written down step=%d error=%s", book.step, error)

    async def info(self) -> dict[str, Any]:
        """Return the size of a batch and the longest sequence, -1 while nobody has said."""
        trainer = self.registry.book.trainer or await self._trainer()
        if trainer is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len}

    def wandb_info(self) -> dict[str, Any]:
        """Return group and project, None while nobody has said."""
        trainer = self.registry.book.trainer
        if trainer is None:
            return {"group": None, "project": None}
        return {"group": trainer.wandb_group, "project": trainer.wandb_project}

    async def status(self) -> dict[str, Any]:
        """Return the step and how many groups wait."""
        status = await self.watch.refresh()
        queued = status.pressure.queued_groups if status is not None else 0
        here = self._outlets.waiting_groups() + len(self._handout.held())
        return {"current_step": self.step(status), "queue_size": queued + here}

    def step(self, status: StatusReply | None) -> int:
        """Return the step: what was handed out here, or where a trainer is that came over the bus."""
        if self.registry.book.trainer is None and status is not None:
            return status.pressure.step
        return self.registry.book.step

    async def _trainer(self) -> Registration | None:
        """Return what environments are told of the trainer: the one that registered here, or one that pulls itself."""
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
        """Register an environment, once the trainer has begun."""
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
        """Take an environment out of the weights until it is heard again."""
        env = self.registry.find(env_id)
        if env is None:
            return {"status": "failure", "error": f"no environment has the id {env_id}"}
        self.registry.leave(env)
        await self._let_go(env)
        return {"status": "success"}

    async def status_env(self, env_id: int) -> dict[str, Any]:
        """Return what an environment paces itself by.

        Raises:
            RefusedBodyError: Nobody has that id.
        """
        env = self._environment(env_id, 404)
        self.registry.hear(env, time.monotonic())
        status = await self._state_for(env)
        batch = status.pressure.batch_sequences if status is not None else 0
        return self.registry.standing(env, self.queued(status), self.step(status), batch)

    async def _state_for(self, env: Environment) -> StatusReply | None:
        """Return the state as an environment must see it: with its own groups, and the queue that belongs to the step.

        What others posted, or what was handed out meanwhile, keeps nobody waiting: those groups are counted here.
        """
        own = self._outlets.get(env.lane)
        posted_at = own.settled_at if own is not None else float("-inf")
        since = max(posted_at, self._handout.leased_at, self._changed_at, time.monotonic() - FRESH_S)
        return await self.watch.refresh(since)

    def _queue_changed(self) -> None:
        """Note that whoever asks from now on must see it."""
        self._changed_at = time.monotonic()
        self.watch.look()

    def queued(self, status: StatusReply | None) -> dict[str, int]:
        """Return the sequences that wait, by lane: at the broker, on their way or acked since, or about to go."""
        lanes = status.pressure.lanes if status is not None else ()
        queued = {lane.env: lane.queued_sequences for lane in lanes if lane.split is Split.TRAIN}
        for group in self._handout.held():
            queued[group.env] = queued.get(group.env, 0) + group.sequences
        for name, sequences in self._outlets.sequences_since(self.watch.asked_at).items():
            queued[name] = queued.get(name, 0) + sequences
        return queued

    async def take(self, posted: Posted, gone: asyncio.Event) -> Post:
        """Return when the broker has all groups; who answers ends the post.

        Args:
            posted: What came. A client that got no answer sends the same again.
            gone: Set when the client is gone.

        Raises:
            RefusedBodyError: One of them names an environment that nobody registered; none was taken.
            GroupTooLargeError: One of them can never be sent; none was taken.
            NoRoomError: There was no room in time; none was taken, or what was is known when they come again.
        """
        environments = [
            self._environment(env_id, 422) if env_id is not None else None for env_id in posted.env_ids
        ]
        post = await self.doubts.begin(posted.digest, len(posted.groups), gone, time.monotonic())
        try:
            await self._send(posted.groups, environments, post)
        except (RefusedBodyError, GroupTooLargeError, NoRoomError):
            (self.doubts.leave if post.came else self.doubts.end)(post)
            raise
        except BaseException:
            self.doubts.leave(post)
            raise
        return post

    async def _send(
        self, groups: Sequence[Group], environments: Sequence[Environment | None], post: Post
    ) -> None:
        by_outlet: dict[Outlet, list[Group]] = {}
        for made, env, group_id in zip(groups, environments, post.ids, strict=True):
            group = replace(made, group_id=group_id)
            if group_id not in post.came:
                by_outlet.setdefault(self._outlets.of(env), []).append(group)
            if env is not None:
                self.registry.hear(env, time.monotonic())
                self.registry.saw(env, group.sequences)
        if sum(map(len, by_outlet.values())) > 1:  # one alone is refused as it is sent
            for outlet, groups in by_outlet.items():
                await outlet.require_sendable(groups, post.gone, self.config.post_wait_s)
        for outlet, groups in by_outlet.items():
            await outlet.deliver(groups, post.gone, self.config.post_wait_s, self._came)

    def _came(self, group: Group) -> None:
        self.doubts.came([group.group_id])
        self.posted_groups += 1
        self._latest = group

    async def latest_example(self) -> Group | None:
        """Return the newest group, also that of an earlier life."""
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
            reason = f"no environment has registered with the id {env_id}"
            raise RefusedBodyError(("body", "env_id"), reason, status, kind="unknown_env")
        return env

    async def _let_go(self, env: Environment) -> None:
        """Give up what an environment claims; what it has queued is trained all the same."""
        outlet = self._outlets.get(env.lane)
        if outlet is None:
            return
        await outlet.close()
        try:
            await self.watch.request(Disconnect(env=env.lane), RESET_S)
        except RolloutMQError as error:
            logger.warning("environment still counts at the broker name=%s error=%s", env.wandb_name, error)

    # Everything

    async def reset_data(self) -> None:
        """Forget the run and everybody; numbers of environments are not given again."""
        async with self._turn:
            await self._reset("reset_data")
            self.registry.forget()
            self._latest = None
            self._write()

    async def _reset(self, why: str) -> None:
        # Who outlived it would register again: a consumer with the step of before, a producer with its minimum share.
        await self._handout.close()
        await self._outlets.close()
        try:
            await self.watch.request(Reset(reason=why), RESET_S)
        except BaseException:
            self._unregistered.set()  # nothing has changed
            raise
        self.doubts.forget_batches()
        self._queue_changed()

    def _write(self) -> None:
        write_json(self._layout.registrations, self.registry.book)


class NotRegisteredError(Exception):
    """A batch was asked for and no trainer has registered."""
