"""The producer: an environment's client, which starts rollouts within credit and delivers every group.

The producer keeps each group in a spool of bounded size until the broker acks it. It resends what was lost and
reconnects when the broker returns. Callers wait for two kinds of credit: a permit to start a rollout (`acquire`), and
room for its group (`send`). They are served in order of arrival and woken by events. Only saving the spool at the end
blocks the event loop. Any number of tasks of one loop may share a producer.

`where` is a run directory or the address of a broker's `serve` socket.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

from rolloutmq.bus.blocking import Facade, OfOneProcess, note_failed_close, with_arguments_of
from rolloutmq.bus.encoding.codec import group_bytes, prepare_group, require_encodable
from rolloutmq.bus.log_throttle import AFTER_S, LogThrottle, WaitLog
from rolloutmq.bus.producer.ack_log import AckLog
from rolloutmq.bus.producer.connection import ProducerConnection, cause
from rolloutmq.bus.producer.credit import Permit
from rolloutmq.bus.producer.open_producers import open_producers
from rolloutmq.bus.producer.send_inbox import SendInbox, SentGroup
from rolloutmq.bus.producer.session import SILENCE_S, SessionState
from rolloutmq.bus.producer.spool import Spool, SpoolEntry
from rolloutmq.bus.producer.spool_file import SpoolFile
from rolloutmq.bus.producer.waiters import CreditWaiters
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.time_limit import time_limit, within
from rolloutmq.schemas.errors import (
    ClosedError,
    GroupTooLargeError,
    InvalidGroupError,
    RolloutMQError,
    UnusablePathError,
    UsageError,
    WaitTimeoutError,
)
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Durability, RunInfo, Wait
from rolloutmq.schemas.wire.requests import RegisterProducer

logger = logging.getLogger(__name__)

SPOOL_BYTES: Final = 64 << 20
"""Default size of the spool."""
DRAIN_S: Final = 10.0
"""Default wait for outstanding acks when the producer closes."""
GOODBYE_S: Final = 2.0
"""Longest wait for the answer to a goodbye; without one the broker ends the session after its `silence_s`."""


class Producer(OfOneProcess):
    """Sends the groups of one environment.

    Open one with `Producer.open`, or with `Producer.blocking` in code without an event loop.
    """

    def __init__(
        self,
        where: Where,
        register: RegisterProducer,
        *,
        spool_bytes: int,
        ack_log: Path | None,
        save_to: Path | None,
        drain_s: float | None,
    ) -> None:
        try:
            self._log = AckLog(ack_log, register.env, register.split)
        except OSError as error:
            raise _unusable("ack_log", error) from None
        self.accepted = 0
        """Number of acked groups."""
        self._session = SessionState(register, Spool(spool_bytes))
        self.as_frames: Mapping[str, int] = self._session.as_frames
        """Number of groups sent as frames instead of through shared memory, by reason."""
        self._waiters = CreditWaiters(self._session)
        self._waiters.problem = self._problem
        self._connection = ProducerConnection(
            where, self._session, self._on_accepted, lambda: self._waiters.waiting
        )
        self._connection.on_registered = self._on_registered
        self._connection.on_tick = self._log_wait
        self._throttle = LogThrottle()
        self._ack_wait = WaitLog()
        self._told_size = False
        self._usual_size = register.group_size
        self._owner = os.getpid()
        self._drain_s = drain_s
        self._file = SpoolFile(save_to, self._session)
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        where: Where,
        *,
        env: str,
        producer: str = "",
        run: str = "default",
        split: Split = Split.TRAIN,
        group_size: int = 1,
        slots: int = 1,
        weight: float = 1.0,
        min_share: float = 0.0,
        max_tokens: int = 0,
        ack_log: Path | str | None = None,
        save_to: Path | str | None = None,
        spool_bytes: int = SPOOL_BYTES,
        drain_s: float = DRAIN_S,
        timeout_s: float | None = None,
    ) -> AsyncIterator["Producer"]:
        """Register a producer; leaving the block closes it.

        Opening waits for the broker. If `save_to` has groups of an earlier process, it also waits until they are acked.
        Closing waits up to `drain_s` for acks; cancelling that wait saves the unacked groups at once. If another error
        ends the block, that error is raised, with a note about a failed closing.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            env: Environment of the groups.
            producer: Name of the producer. A newer producer of the same name fences the older one. Default: made of
                environment, host and process id, with a number for further producers of the process.
            run: Name of the run.
            split: Split of the groups: train or eval.
            group_size: Usual number of sequences in a group.
            slots: Wanted number of concurrent rollouts.
            weight: Share of the batches, relative to the other environments.
            min_share: Part of every batch reserved for the environment, 0 to 1.
            max_tokens: Longest sequence it produces, in tokens; 0 if unknown.
            ack_log: File that gets one `AckedGroup` line for each acked group.
            save_to: File for unacked groups at the end. Give `producer` too, so the next process finds
                them. Without a file, closing raises UnackedError.
            spool_bytes: Size of the spool, in bytes; also the largest group.
            drain_s: Longest wait for acks when closing, in seconds.
            timeout_s: Longest wait when opening, in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: The producer is not registered after `timeout_s`.
            RefusedError: The broker does not accept this producer.
            SessionFencedError: A newer producer of the same name registered meanwhile.
            UsageError: An argument is out of range, or `save_to` has the groups of another producer.
            RecordVersionError: Another version of RolloutMQ wrote `save_to`.
            UnackedError: At the end some groups are neither acked nor saved; the error has their ids.
        """
        limit_s, drain_limit_s = time_limit("timeout_s", timeout_s), time_limit("drain_s", drain_s)
        if not isinstance(spool_bytes, int) or spool_bytes < 1:
            raise UsageError(f"spool_bytes: must be a positive number of bytes (got {spool_bytes!r})")
        name = producer or open_producers.claim(env)
        try:
            register = RegisterProducer(
                producer=name,
                run=run,
                env=env,
                split=split,
                slots=slots,
                group_size=group_size,
                weight=weight,
                min_share=min_share,
                max_tokens=max_tokens,
                pid=os.getpid(),
                host=socket.gethostname(),
            )
            require_encodable(register)
            made = cls(
                where,
                register,
                spool_bytes=spool_bytes,
                ack_log=None if ack_log is None else Path(ack_log),
                save_to=None if save_to is None else Path(save_to),
                drain_s=drain_limit_s,
            )
            async with made._opened(limit_s):
                yield made
        finally:
            if not producer:
                open_producers.release(name)

    @staticmethod
    @with_arguments_of(lambda: Producer.open)
    def blocking(where: Where, **options: Any) -> "BlockingProducer":
        """Return a blocking producer with the options of `open`: `with Producer.blocking(...) as producer`."""
        return BlockingProducer(lambda: Producer.open(where, **options), "rolloutmq producer")

    @property
    def name(self) -> str:
        """Name of the producer."""
        return self._session.register.producer

    @property
    def draining(self) -> asyncio.Event:
        """Set once no new rollout may start: the broker drains the worker, or `start_draining` was called."""
        return self._waiters.draining

    @property
    def info(self) -> RunInfo:
        """Description of the run at the time of registration."""
        return self._connection.info

    @property
    def session(self) -> int:
        """Number of the session."""
        return self._session.number

    @property
    def policy(self) -> PolicyVersion:
        """Current policy of the trainer, from the last ack."""
        return self._session.credit.policy

    @property
    def step(self) -> int:
        """Current optimizer step of the trainer, from the last ack."""
        return self.policy.step

    @property
    def durability(self) -> Durability:
        """What an acked group survives, from the last ack."""
        return self._session.credit.durability

    @property
    def wait(self) -> Wait:
        """Reason that limits the credit now, from the last ack; `Wait.NONE` if nothing does."""
        return self._session.credit.wait

    @property
    def waits_s(self) -> float:
        """Total waiting time of all calls of `acquire` and `send`, in seconds."""
        return self._waiters.waits_s

    @property
    def unacked(self) -> int:
        """Number of groups that were sent and are not acked."""
        return len(self._session.spool) + self._waiters.inbox_groups

    @property
    def abandoned(self) -> int:
        """Number of abandoned rollouts of this session."""
        return self._session.credit.abandoned

    async def acquire(self, timeout_s: float | None = None) -> Permit:
        """Wait until another rollout may start, and return its permit.

        `wait` has the reason of the waiting. The permit ends when its group is sent or when it is abandoned; as a
        context manager it ends with the block. Cancelled: the next waiter gets the permit.

        Args:
            timeout_s: Longest wait in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: There is no permit after `timeout_s`.
            DrainingError: No new rollout may start.
            SessionFencedError: A newer producer of the same name took over.
            ClosedError: The producer is closed.
            ForkedError: This process is a forked child of the one that opened the producer.
        """
        return await self._waiters.acquire(time_limit("timeout_s", timeout_s))

    async def send(
        self, group: Group, permit: Permit | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Put a group into the spool; the producer delivers it in the background.

        Waits while the spool is full or credit is missing, and for a permit if none is given. Do not change the group's
        arrays until it is acked: large ones are not copied. Cancelled: either the group is in the spool and the permit
        has ended, or nothing happened.

        Args:
            group: The group. It is not acked yet when the call returns; see `send_acked` and `flush`.
            permit: Permit of its rollout, from `acquire`. None takes one.
            timeout_s: Longest wait in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: The group is not in the spool after `timeout_s`; nothing happened.
            GroupTooLargeError: The group can never be sent; raised at once.
            InvalidGroupError: A value cannot be encoded, or `group` is not a `Group`.
            UsageError: The permit has ended.
            DrainingError: No permit was given, and no new rollout may start.
            SessionFencedError: A newer producer of the same name took over.
            ClosedError: The producer is closed.
            ForkedError: This process is a forked child of the one that opened the producer.
        """
        waiters, connection = self._waiters, self._connection
        waiters.require_open()
        if not isinstance(group, Group):
            raise _no_group(group)
        if permit is not None and not isinstance(permit, Permit):
            raise UsageError(
                f"permit: must come from acquire (got {type(permit).__name__}); timeout_s is given by its name"
            )
        limit_s = None if timeout_s is None else time_limit("timeout_s", timeout_s)
        laid = self._session.lay(group, connection.max_group_bytes)
        try:
            if not waiters.admit(group, laid, permit):
                await waiters.hand_over(group, laid, permit, limit_s)
        except BaseException:
            laid.cancel()
            raise
        if group.sequences != self._usual_size:
            self._check_size(group)
        if not connection.send_arrived() and connection.fills_turn(laid.encoded.nbytes):
            await asyncio.sleep(0)

    def _open_inbox(self, post: Callable[[Callable[[], None]], None]) -> SendInbox:
        """Return an inbox through which other threads send groups; `post` makes the loop call a function."""

        def may_take(groups: int, nbytes: int) -> bool:
            return nbytes <= self._connection.max_group_bytes and self._waiters.may_take(groups, nbytes)

        self._waiters.inbox = SendInbox(may_take, self._take, post)
        return self._waiters.inbox

    def _take(self, sent: SentGroup, force: bool) -> bool:
        """Put a group of the inbox into the spool; False without credit, which `force` ignores."""
        if not force and not self._waiters.may_take_now(sent.prepared.nbytes):
            return False
        try:
            laid = self._session.lay(sent.prepared, self._session.spool.capacity_bytes)
            if not force and not self._waiters.may_take_now(laid.encoded.nbytes):
                laid.cancel()
                return False
            self._waiters.take_in(sent.group, laid)
        except Exception as error:  # noqa: BLE001 - its caller has gone on: every later call raises the error
            logger.error("group lost producer=%s group=%s error=%s", self.name, sent.group.group_id, error)
            asyncio.get_running_loop().call_soon(self._waiters.shut, error)
            return True
        self._check_size(sent.group)
        self._connection.send_arrived()
        return True

    def _check_size(self, group: Group) -> None:
        """Warn once: sizes may differ, but credit and pacing assume the usual one. An evaluation asks for its sizes."""
        own = self._session.register
        if group.sequences == own.group_size or self._told_size or own.split is Split.EVAL:
            return
        self._told_size = True
        logger.warning(
            "group of another size producer=%s group=%s sequences=%d group_size=%d: credit counts group_size for each "
            "rollout; open the producer with the usual size",
            self.name, group.group_id, group.sequences, own.group_size,
        )  # fmt: skip

    async def send_acked(
        self, group: Group, permit: Permit | None = None, *, timeout_s: float | None = None
    ) -> "asyncio.Future[None]":
        """Send a group like `send`, and return a future that ends with its ack.

        The future fails if the producer closes or is fenced before the ack. Cancelled: call `handed_over`, which
        returns the future if the group reached the spool.
        """
        ack = self._waiters.expect(group.group_id)
        try:
            await self.send(group, permit, timeout_s=timeout_s)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._waiters.handed_over(group.group_id)
            raise
        self._waiters.handed_over(group.group_id)
        return ack

    def require_sendable(self, group: Group) -> None:
        """Raise GroupTooLargeError or InvalidGroupError if `send` can never accept the group."""
        nbytes = group_bytes(group)
        if nbytes > (limit := self._connection.max_group_bytes):
            raise GroupTooLargeError(nbytes, limit)

    def handed_over(self, group_id: str) -> "asyncio.Future[None] | None":
        """Return the future of a cancelled `send_acked`, or None if the group did not reach the spool. Call it once."""
        return self._waiters.handed_over(group_id)

    def abandon(self, permit: Permit) -> None:
        """End the permit of a failed rollout; the broker grants another one. Does nothing if the permit has ended."""
        self._session.credit.abandon(permit)

    def pause(self, *, paused: bool = True) -> None:
        """Leave the permits to other producers: `acquire` waits until `pause(paused=False)`. Open permits stay."""
        self._session.credit.pause(paused=paused)
        self._connection.ask()

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every group that was sent before the call is acked.

        Args:
            timeout_s: Longest wait in seconds; None waits without a limit.

        Returns:
            False if the time ran out. Acked groups are in the ack log, unless its disk failed.

        Raises:
            SessionFencedError: A newer producer of the same name took over.
            RefusedError: The broker does not accept the producer any more.
            ClosedError: The producer is closed.
            ForkedError: This process is a forked child of the one that opened the producer.
        """
        self._waiters.require_open()
        done = await self._waiters.flushed(time_limit("timeout_s", timeout_s))
        self._waiters.require_open()
        return done

    def start_draining(self) -> None:
        """Start no new rollout: waiting calls of `acquire` raise DrainingError. Groups with a permit can still be
        sent."""
        self._session.draining = True
        self._waiters.serve()

    @asynccontextmanager
    async def _opened(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Keep the producer open during the block."""
        open_producers.opened(self)
        try:
            await self._start_within(timeout_s)
            yield
        except BaseException as error:
            try:
                await self.close()
            except Exception as failure:  # noqa: BLE001 - it must not hide the error of the block
                note_failed_close(error, failure)
            raise
        else:
            await self.close()

    async def _start_within(self, timeout_s: float | None) -> None:
        try:
            await within(timeout_s, f"opening of producer {self.name}", self._start(), self._problem)
        except WaitTimeoutError:
            self._drain_s = 0.0  # restored groups are still in their file
            raise

    def _problem(self) -> str:
        """Return what keeps a call waiting."""
        if problem := self._connection.problem:
            return problem
        if not self._session.number:
            return "the broker has not answered the registration"
        spool = self._session.spool
        return (
            f"the broker gives no credit or no ack: {self._reason()} "
            f"({len(spool)} groups with {spool.nbytes} of {spool.capacity_bytes} bytes are unacked)"
        )

    def _reason(self) -> str:
        """Return why there is no credit. A silent broker may have had none when it last spoke."""
        silent_s = self._session.silent_s(time.monotonic())
        if self.wait is Wait.NONE and silent_s >= SILENCE_S:
            return f"no answer from {self._connection.address} for {silent_s:.0f} s"
        return self.wait.value

    async def _start(self) -> None:
        try:
            restored = self._file.load()
        except OSError as error:
            raise _unusable("save_to", error) from None
        self._task = asyncio.create_task(self._run(), name=f"producer {self.name}")
        await self._registration()
        if restored:
            await self.flush()
            self._file.remove()
            # New groups get a new session. Otherwise, after a kill, the next process would continue with the numbers
            # in the file and use some of them twice.
            self._registered.clear()
            self._connection.renew()
            await self._registration()

    async def _registration(self) -> None:
        await self._registered.wait()
        self._waiters.require_open()

    async def _run(self) -> None:
        try:
            await self._connection.run()
        except Exception as error:
            # The boundary of the task: from now on every call raises this error.
            failure = cause(error)
            logger.error(
                "producer failed error=%s", failure, exc_info=not isinstance(failure, RolloutMQError)
            )
            self._waiters.shut(failure)
            self._registered.set()

    def _on_registered(self) -> None:
        self._file.renew()
        self._registered.set()

    def _log_wait(self) -> None:
        """Warn if nothing moves for some seconds: callers without a view of the broker would wonder."""
        if self._waiters.inbox_groups:
            self._waiters.serve()  # an interrupted `send` may have told nobody of its group
        self._log_ack_wait(time.monotonic())
        if (stuck_s := self._waiters.stuck_s()) < AFTER_S:
            return
        if self._throttle.is_due(self.wait.value, time.monotonic()):
            logger.warning(
                "waiting for credit producer=%s reason=%s waited_s=%.0f", self.name, self._reason(), stuck_s
            )

    def _log_ack_wait(self, now: float) -> None:
        if not self._waiters.flushing:
            self._ack_wait.over()
        elif self._ack_wait.is_due(self.wait.value, now):
            logger.warning(
                "waiting for acks producer=%s unacked=%d reason=%s waited_s=%.0f",
                self.name, self.unacked, self._reason(), self._ack_wait.waited_s(now),
            )  # fmt: skip

    def _on_accepted(self, entries: list[SpoolEntry]) -> None:
        self._log.write(entries, self._session.number)
        self._waiters.acked(entry.header.group_id for entry in entries)
        self.accepted += len(entries)
        if entries:
            self._ack_wait.over()
        if self._session.draining and not self.draining.is_set():
            logger.info("draining producer=%s", self.name)
        self._waiters.serve()
        self._connection.send_soon()  # together with the groups of the tasks that have just got room

    async def close(self) -> None:
        """Wait up to `drain_s` for acks, save unacked groups, end the session. May be called twice.

        Cancelled: unacked groups are saved at once. In a forked child it does nothing.

        Raises:
            UnackedError: Some groups are neither acked nor saved.
        """
        if os.getpid() != self._owner:
            return
        open_producers.closed(self)
        task, self._task = self._task, None
        alive = task is not None and self._waiters.failure is None and self._registered.is_set()
        try:
            if alive:
                self._waiters.shut(None)
                await self._waiters.flushed(self._drain_s)
        finally:
            await self._end(task, alive)
            self._waiters.fail_acks(ClosedError())

    async def _end(self, task: "asyncio.Task[None] | None", alive: bool) -> None:
        if task is not None:
            # From here on no ack is applied, so no group is both logged as acked and saved.
            self._connection.leaving = True
            task.cancel()
            await asyncio.wait({task})
        try:
            if alive:
                try:
                    self._file.leave(self._why_unacked())
                finally:
                    await self._connection.goodbye(GOODBYE_S)
            elif task is not None:
                self._file.set_aside(self._why_unacked())
        finally:
            await self._connection.close()
            self._log.close()

    def _why_unacked(self) -> str:
        failure = self._waiters.failure
        if failure is not None and not isinstance(failure, ClosedError):
            return str(failure)
        late = f"after drain_s of {self._drain_s:g} s"
        waited = "the wait for acks was cancelled" if self._drain_s is None else late
        return f"{waited}, {problem}" if (problem := self._connection.problem) else waited


def _unusable(option: str, error: OSError) -> UnusablePathError:
    return UnusablePathError(f"{option} {error.filename}", error.strerror or str(error))


def _no_group(given: Any) -> InvalidGroupError:
    return InvalidGroupError("*", f"must be a Group (got {type(given).__name__}); make one with Group.build")


class BlockingProducer(Facade[Producer]):
    """`Producer` for code without an event loop: every call blocks until it is done.

    It has the names of `Producer` but for `send_acked` and `handed_over`, which return futures: call `send`, then
    `flush`. Several threads may call. A call interrupted by Ctrl-C has the effects of a cancelled one. Open it with
    `with Producer.blocking(...) as producer`.
    """

    _inbox: SendInbox

    def acquire(self, timeout_s: float | None = None) -> Permit:
        """See `Producer.acquire`. `send` without a permit calls it itself."""
        return self._run(self._object.acquire(timeout_s))

    def __enter__(self) -> Self:
        super().__enter__()
        self._inbox = self._object._open_inbox(self._post)
        return self

    def send(self, group: Group, permit: Permit | None = None, *, timeout_s: float | None = None) -> None:
        """See `Producer.send`.

        Without `permit` and `timeout_s` it does not wait for the loop's thread if there seems to be credit. The group
        is then on its way into the spool, one of at most 64 (and one for each further thread), and counts as unacked.
        If another call took the credit, it waits for credit there, ahead of all others.
        """
        producer = self._object
        producer._waiters.require_open()
        if not isinstance(group, Group):
            raise _no_group(group)
        limit_s = None if timeout_s is None else time_limit("timeout_s", timeout_s)
        exact = permit is not None or limit_s is not None
        if exact or not self._inbox.offer(group, prepare_group(group)):
            self._run(producer.send(group, permit, timeout_s=limit_s))

    def require_sendable(self, group: Group) -> None:
        """See `Producer.require_sendable`."""
        self._call(self._object.require_sendable, group)

    def abandon(self, permit: Permit) -> None:
        """See `Producer.abandon`."""
        self._call(self._object.abandon, permit)

    def pause(self, *, paused: bool = True) -> None:
        """See `Producer.pause`."""
        self._call(lambda: self._object.pause(paused=paused))

    def flush(self, timeout_s: float | None = None) -> bool:
        """See `Producer.flush`."""
        return self._run(self._object.flush(timeout_s))

    def start_draining(self) -> None:
        """See `Producer.start_draining`."""
        self._call(self._object.start_draining)

    @property
    def name(self) -> str:
        """See `Producer.name`."""
        return self._object.name

    @property
    def draining(self) -> bool:
        """Whether no new rollout may start."""
        return self._object.draining.is_set()

    @property
    def info(self) -> RunInfo:
        """See `Producer.info`."""
        return self._object.info

    @property
    def session(self) -> int:
        """See `Producer.session`."""
        return self._object.session

    @property
    def policy(self) -> PolicyVersion:
        """See `Producer.policy`."""
        return self._object.policy

    @property
    def step(self) -> int:
        """See `Producer.step`."""
        return self._object.step

    @property
    def durability(self) -> Durability:
        """See `Producer.durability`."""
        return self._object.durability

    @property
    def accepted(self) -> int:
        """See `Producer.accepted`."""
        return self._object.accepted

    @property
    def unacked(self) -> int:
        """See `Producer.unacked`."""
        return self._object.unacked

    @property
    def as_frames(self) -> Mapping[str, int]:
        """See `Producer.as_frames`."""
        return self._object.as_frames

    @property
    def abandoned(self) -> int:
        """See `Producer.abandoned`."""
        return self._object.abandoned

    @property
    def wait(self) -> Wait:
        """See `Producer.wait`."""
        return self._object.wait

    @property
    def waits_s(self) -> float:
        """See `Producer.waits_s`."""
        return self._object.waits_s
