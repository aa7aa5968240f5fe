"""The data plane: one thread that owns the broker's four sockets and drives the core.

    wait      poll until a socket is readable, the core's next deadline, or a request to stop
    round     a bounded burst from each readable socket, control first, so no peer starves another
    perform   send replies and events at once; a peer that left or does not read is counted, never waited for
    commit    hand events to the journal, and send deferred replies once they are durable

Limits are checked before a message is decoded. A message that fails is counted by reason and dropped. State of the
run lives in the core alone. Above the high-water mark `ingest` is not polled: its pipes fill and the producers block.
The same holds while the journal is far behind, or has no room for the next group.
"""

import errno
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import zmq

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.transport.sockets import Socket, send_frames
from rolloutmq.schemas.errors import MalformedError, WireError
from rolloutmq.schemas.files import DroppedGroup, SettledBatch
from rolloutmq.schemas.wire.control import Requeue
from rolloutmq.schemas.wire.envelope import Envelope, ErrorCode, GroupHeader
from rolloutmq.schemas.wire.joining import KEYS_SHOWN, PROBLEM_CHARS, JoiningRequest, NetworkStatus
from rolloutmq.schemas.wire.replies import ErrorReply
from rolloutmq.schemas.wire.replies import Reply as ReplyMessage
from rolloutmq.services.broker.actions import (
    Action,
    Bury,
    Dropped,
    Expired,
    Publish,
    Recorded,
    Reply,
    Route,
    Unbury,
)
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.io.admission import Admission
from rolloutmq.services.broker.io.deferred_replies import DeferredReplies
from rolloutmq.services.broker.io.door import Door
from rolloutmq.services.broker.io.fd_guard import FdGuard
from rolloutmq.services.broker.io.memory_guard import REMOTE_CUTS, MemoryGuard, MemoryRemedy
from rolloutmq.services.broker.io.receive import (
    IN_LINE,
    Arrival,
    Asked,
    discard,
    receive,
    receive_small,
    receive_small_frames,
    route_of,
)
from rolloutmq.services.broker.io.shared_run import SharedRun
from rolloutmq.services.broker.io.stale_log import StaleLog
from rolloutmq.services.broker.journal.dead_letters import DeadGroup, DeadLetterStore
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup


class Waker:
    """An eventfd that ends a poll. `set` is safe in any thread and in signal handlers."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it unreadable again; no error if it is."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._fd)


logger = logging.getLogger(__name__)


BURST_MESSAGES: Final = 64
"""Most messages taken from one socket in a round; from `serve`, as many again that waited in line."""

REQUESTS_READ: Final = 4 * BURST_MESSAGES
"""Most requests read in a round, to find those of trainers; of the others `BURST_MESSAGES` are answered."""

BACKLOG_REQUESTS: Final = 1024
"""Most requests that were read and wait for their turn; above it no further ones are read."""

BACKLOG_BYTES: Final = 4 << 20
"""The same for their bytes."""

BURST_BYTES: Final = 16 << 20
"""Most bytes of groups taken in a round; at memory speed that is a few milliseconds."""

REQUEST_LIMIT_BYTES: Final = 1 << 20
"""Largest request: a settlement of 10,000 groups takes about half of it."""

EVENT_LIMIT_BYTES: Final = 64 << 10
"""Largest event of another service; they are samples of a few hundred bytes."""

HEALTH_S: Final = 0.05
"""How often the journal's health is reported to the core."""

BURST_S: Final = 0.003
"""Longest burst of groups before requests get their turn: a trainer waits for each of two."""

DRAIN_S: Final = 2.0
"""At the end, longest time to accept messages that have arrived."""

QUIET_MS: Final = 20
"""At the end, a message within this time of the last one had arrived before: it was in the kernel or the library."""

DISCARD_S: Final = 0.5
"""Longest time to discard messages on `ingest` after all connections were cut; peers send more when they reconnect."""

SWEEP_S: Final = 1.0
"""How often silent engines of other hosts are looked for, and monitors hear of other hosts."""

IDLE_S: Final = 60.0
"""Longest wait without a deadline."""


@dataclass(frozen=True)
class BrokerSockets:
    """The four sockets, and the addresses they are bound to."""

    ingest: Socket
    serve: Socket
    events: Socket
    publish: Socket
    remote_ingest: Socket | None = None
    """A second one for the groups of other hosts, so that those of this host cost no look at their sender."""
    addresses: list[str] = field(default_factory=list)

    def remote(self, name: str) -> Socket:
        """Return the socket for clients of other hosts."""
        socket = self.remote_ingest if name == "ingest" else getattr(self, name)
        assert isinstance(socket, zmq.Socket)
        return socket

    @property
    def ingests(self) -> tuple[Socket, ...]:
        return (self.ingest,) if self.remote_ingest is None else (self.ingest, self.remote_ingest)

    @property
    def all(self) -> tuple[Socket, ...]:
        return *self.ingests, self.serve, self.events, self.publish

    def close(self) -> None:
        for socket in self.all:
            socket.close()


class LineSink(Protocol):
    """A file that takes lines."""

    def write(self, data: bytes, /) -> int: ...


class BrokerLogs(NamedTuple):
    """The broker's logs for people: `dropped.jsonl` and `settled.jsonl`."""

    dropped: LineSink
    settled: LineSink


def _is_publication(action: Action) -> bool:
    return isinstance(action, Publish)


class DataPlane:
    """Drives the core on its sockets. All methods but `stop` belong to one thread."""

    def __init__(
        self,
        core: BrokerCore,
        sockets: BrokerSockets,
        logs: BrokerLogs,
        dead: DeadLetterStore,
        max_group_bytes: int,
        wake: Waker,
        journal: Journal | None = None,
        memory_guard: MemoryGuard | None = None,
        door: Door | None = None,
        shared_run: SharedRun | None = None,
    ) -> None:
        self.core = core
        self._journal = journal
        self._dead = dead
        self._health_due = 0.0
        self._deferred = DeferredReplies()
        self.unsent: dict[str, int] = {}
        """Replies that could not be sent, by kind and reason."""
        self.rejections: dict[str, int] = {}
        """Malformed messages, by socket and reason."""
        self.pauses: dict[str, int] = {}
        """How often reading `ingest` paused, by reason."""
        self._sockets = sockets
        self._stale_log = StaleLog()
        self._fd_guard = FdGuard(sockets.addresses)
        self._memory_guard = memory_guard
        self._door = door
        self._shared_run = shared_run
        self._sweep_due = 0.0
        self._logs = logs
        self._max_group_bytes = max_group_bytes
        self._admission = Admission(journal, max_group_bytes)
        self._wake = wake
        self._wake_fd = wake.fileno()
        self._ingests = sockets.ingests
        self._in_line: deque[Asked] = deque()
        self._in_line_bytes = 0
        self._stopping = False
        if journal is None:
            core.answer_by(self._send_reply)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        for socket in (sockets.serve, sockets.events, sockets.publish):
            self._poller.register(socket, zmq.POLLIN)
        if door is not None and door.questions is not None:
            self._poller.register(door.questions, zmq.POLLIN)
        self._reading = False

    def stop(self) -> None:
        """Ask `run` to return. For any thread, and for signal handlers."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Serve until stopped or until a client requests a shutdown, then accept what has arrived.

        Raises:
            JournalFailedError: The disk failed; nothing more is sent.
        """
        due = self.core.next_deadline(time.monotonic())
        while not self._stopping and not self.core.shutdown:
            self._round(self._wait(due))
            due = self._tick(due)
            if self._journal is not None:
                self._commit()
                due = self.core.next_deadline(
                    time.monotonic()
                )  # what is written frees slots: acks tell of them
            self._fd_guard.check(time.monotonic())
            self._guard_memory(time.monotonic())
        self._fd_guard.close()
        self._drain()
        self._warn(self._stale_log.rest())
        logger.info("data plane ended rejected=%s unsent=%s", self.rejections, self.unsent)

    def _wait(self, due: float) -> set[object]:
        reading = self._accepts_groups()
        if reading != self._reading:
            for socket in self._sockets.ingests:
                if reading:
                    self._poller.register(socket, zmq.POLLIN)
                else:
                    self._poller.unregister(socket)
            if not reading:
                self._count(self.pauses, self._pause_reason(), "ingest paused")
            self._reading = reading
        if self._journal is not None:
            due = min(due, self._journal.next_deadline())
        if self._in_line or (self._admission and reading):
            due = -math.inf
        due = min(
            due, self._fd_guard.due, self._memory_guard.due if self._memory_guard is not None else math.inf
        )
        if self._door is not None:
            due = min(due, self._door.due)
        left_s = min(max(due - time.monotonic(), 0.0), IDLE_S)
        return {socket for socket, _ in self._poller.poll(math.ceil(left_s * 1e3))}

    def _accepts_groups(self) -> bool:
        """Return whether `ingest` may be read now."""
        return self.core.reading() and (self._journal is None or not self._journal_full(self._journal))

    def _journal_full(self, journal: Journal) -> bool:
        return journal.full or self._admission.blocked

    def _pause_reason(self) -> str:
        journal = self._journal
        return "journal_slow" if journal is not None and self._journal_full(journal) else "global_full"

    def _round(self, readable: set[object]) -> None:
        sockets = self._sockets
        if self._wake_fd in readable:
            self._wake.clear()
        if self._door is not None:
            self._open_door(self._door)
        if sockets.serve in readable or self._in_line:
            self._serve(has_more=sockets.serve in readable)
        if sockets.events in readable:
            self._burst(sockets.events, self._events_one)
        if sockets.publish in readable:
            self._burst(sockets.publish, self._publish_one)
        held_up = self._journal is not None and bool(self._admission)
        for socket in self._ingests:
            if held_up or socket in readable:
                self._ingest(socket, BURST_MESSAGES, BURST_BYTES)

    def _open_door(self, door: Door) -> None:
        """Answer who may enter: clients wait for it with their first message."""
        for reason in door.look(time.monotonic()):
            self._reject(f"listen: {reason}")

    def _tick(self, due: float) -> float:
        """Do the core's periodic work, if some is due; return when the next is."""
        # Messages of this round may have moved the deadline, forward or back: the earlier one counts.
        now = time.monotonic()
        if now < due and now < (due := self.core.next_deadline(now)):
            return due
        if self._journal is not None and now >= self._health_due:
            self._health_due = now + HEALTH_S
            self.core.journaled(self._journal.status(), now)
        self._perform(self.core.tick(now, time.time()))
        self._warn(self._stale_log.warnings(now))
        if self._shared_run is not None and now >= self._sweep_due:
            self._sweep_due = now + SWEEP_S
            self._shared_run.sweep(now)
            self._tell_network(self._shared_run, now)
            self._shared_run.clock_log.note(self.core.clocks(), time.time())
        return self.core.next_deadline(now)

    def _tell_network(self, shared_run: SharedRun, now: float) -> None:
        """Tell monitors what is known of other hosts."""
        if self._door is None:
            return
        known, keys = self._door.report(now)
        status = NetworkStatus(
            listen=self._door.address,
            insecure=self._door.is_insecure,
            version=self.core.version,
            known_keys=known,
            keys_problem=self._door.problem[:PROBLEM_CHARS],
            keys=shared_run.with_refused(keys, now),
            engines=shared_run.engines(now, self.core.version),
            relays=shared_run.relays.report(now),
            workers=self._door.owners_of(self.core.joined_workers()[:KEYS_SHOWN]),
        )
        self.core.networked(status)
        topic = topics.telemetry("network", shared_run.name)
        self._sockets.events.send_multipart([topic, codec.encode(status)], zmq.NOBLOCK)

    def _warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            logger.warning("%s", line)

    def _guard_memory(self, now: float) -> None:
        """Free memory that peers fill with unfinished messages; honest peers resend."""
        if self._memory_guard is None:
            return
        remedy = self._memory_guard.check(now)
        if remedy not in REMOTE_CUTS:
            return
        whose = "" if remedy is MemoryRemedy.CUT else " of other hosts"
        self._reject(f"sockets: unfinished messages{whose}")
        if not self._accepts_groups():
            for socket in self._sockets.ingests:
                if remedy is MemoryRemedy.CUT or socket is not self._sockets.ingest:
                    discard(socket, now + DISCARD_S)

    def _commit(self) -> None:
        """Advance the journal, and send the replies that became durable."""
        if self._journal is None:
            return
        now = time.monotonic()
        self._journal.advance(now, urgent=self._deferred.urgent)
        self.core.replies_waited(*self._deferred.waited_s(now))
        for action in self._deferred.release(self._journal.done, self._journal.priority_done):
            self._do(action)
        if self._journal.wants_snapshot:
            self._journal.append(self.core.events())
            self._journal.rotate(self.core.snapshot())

    def _drain(self) -> None:
        until = time.monotonic() + DRAIN_S
        for socket in self._sockets.ingests:
            while self._accepts_groups() and socket.poll(QUIET_MS) and time.monotonic() < until:
                self._ingest(socket, BURST_MESSAGES, BURST_BYTES)
                self._commit()
        self._serve(has_more=True)
        while self._in_line:
            self._serve(has_more=False)
        self._perform(self.core.tick(time.monotonic(), time.time()))
        self._perform(self.core.final_samples(time.time()))
        self._commit()
        while self._deferred and time.monotonic() < until:
            self._poller.poll(QUIET_MS)
            self._wake.clear()
            self._commit()

    def _burst(self, socket: Socket, take_one: Callable[[], None]) -> None:
        """Take what has arrived at a socket; to ask whether more has costs a third of an error that says no."""
        try:
            for _ in range(BURST_MESSAGES):
                take_one()
                if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
        except zmq.Again:
            return

    def _ingest(self, socket: Socket, messages: int, nbytes: int) -> None:
        """Accept up to that much of the groups that have arrived at a socket."""
        until, is_open = time.monotonic() + BURST_S, self._admission.is_open
        try:
            while (
                messages > 0 and nbytes > 0 and self._accepts_groups() and (now := time.monotonic()) < until
            ):
                messages -= 1
                if is_open or not self._admission:
                    try:
                        message = receive(socket, self._max_group_bytes)
                        nbytes -= message.nbytes
                        envelope = codec.decode_envelope(message.first, len(message.frames), message.nbytes)
                    except WireError as error:
                        self._reject(f"ingest: {error.code.value}")
                        continue
                    if socket is not self._sockets.ingest and not self._may_deliver(message, envelope):
                        continue
                    messages -= len(envelope.groups) - 1
                    if is_open:
                        self._perform(self.core.ingest(envelope, message.frames, now, time.time()))
                        continue
                    self._admission.put(envelope, message.frames)
                for admitted, frames in self._admission.take():
                    self._perform(self.core.ingest(admitted, frames, now, time.time()))
        except zmq.Again:
            return

    def _may_deliver(self, message: Arrival, envelope: Envelope) -> bool:
        """Return whether groups that came by the listener are of a producer of their key; count them if not."""
        if self._door is None or (
            not envelope.offsets and self._door.delivers(message.head, envelope.producer)
        ):
            return True
        self._reject("ingest: forbidden")
        return False

    def _serve(self, *, has_more: bool) -> None:
        """Read requests if there are some, answer those that do not wait in line, and then the first in the line."""
        serve, line, left = self._sockets.serve, self._in_line, BURST_MESSAGES
        try:
            for _ in range(REQUESTS_READ if has_more else 0):
                if len(line) >= BACKLOG_REQUESTS or self._in_line_bytes >= BACKLOG_BYTES or not left:
                    break
                asked = self._next_request()
                if asked is not None and isinstance(asked.request, IN_LINE):
                    line.append(asked)
                    self._in_line_bytes += asked.nbytes
                else:
                    left -= 1
                    if asked is not None:
                        self._answer(asked)
                if not int(serve.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    break
        except zmq.Again:
            pass
        for _ in range(min(len(line), BURST_MESSAGES)):
            asked = line.popleft()
            self._in_line_bytes -= asked.nbytes
            self._answer(asked)

    def _next_request(self) -> Asked | None:
        """Read a request; None if it is none, which its sender is told if it can be."""
        sender = None
        if self._door is None:
            frames = receive_small(self._sockets.serve, REQUEST_LIMIT_BYTES)
        else:
            whole = receive_small_frames(self._sockets.serve, REQUEST_LIMIT_BYTES)
            frames = [frame.bytes for frame in whole]
            sender = self._door.sender_of(whole[-1]) if whole else None
        route = route_of(frames)
        if route is None:
            self._reject("serve: malformed")
            return None
        try:
            if len(frames) != len(route) + 1:
                raise MalformedError(
                    f"a request has exactly one frame after the empty one (got {len(frames) - len(route)})"
                )
            return Asked(route, codec.decode_request(frames[-1]), sender, len(frames[-1]))
        except WireError as error:
            self._reject(f"serve: {error.code.value}")
            self._send_reply(route, ErrorReply(code=error.code, detail=error.detail[:500]))
            return None

    def _answer(self, asked: Asked) -> None:
        route, request, sender, _ = asked
        if self._door is not None:
            allowed = self._door.asked(sender, request)
            if allowed is None or isinstance(allowed, ErrorReply):
                self._refuse(route, allowed)
                return
            request = allowed
        if isinstance(request, Requeue):
            self._requeue(route, request)
        elif isinstance(request, JoiningRequest):
            self._share(route, request, sender or "")
        else:
            self._perform(self.core.request(route, request, time.monotonic(), time.time()))

    def _refuse(self, route: Route, refusal: ErrorReply | None) -> None:
        """Send a refusal, or drop the request of a revoked key without an answer: its connection is being cut."""
        self._reject("serve: revoked key" if refusal is None else f"serve: {refusal.code.value}")
        if refusal is not None:
            self._send_reply(route, refusal)

    def _share(self, route: Route, request: JoiningRequest, sender: str) -> None:
        """Answer a request for the files of the run, which the core does not know."""
        if self._shared_run is None:
            self._send_reply(route, ErrorReply(code=ErrorCode.UNKNOWN, detail="this broker shares no run"))
        else:
            self._send_reply(route, self._shared_run.answer(request, time.monotonic(), sender))

    def _requeue(self, route: Route, request: Requeue) -> None:
        """Queue dead groups again; their dead letters are removed once that is durable."""
        refused: dict[str, str] = {}
        found = {name: self._dead.find(name) for name in request.groups}
        refused |= dict.fromkeys(
            (name for name, group in found.items() if group is None), "there is no dead group of this id"
        )
        groups = list(found.values())
        if not request.groups:
            entries = list(self._dead.entries())
            groups = [self._dead.open(entry.order) for entry in entries if entry.letter is not None]
            refused = {entry.path.name: entry.problem for entry in entries if entry.letter is None}
        dead: list[StoredGroup] = []
        for group in groups:
            if group is not None and group.frames is None:
                refused[group.meta.header.group_id] = "its contents were not kept, or are damaged"
            elif group is not None and self._lacks_room([*(one.header for one in dead), group.meta.header]):
                refused[group.meta.header.group_id] = "the disk is full; requeue it when there is room"
            elif group is not None:
                dead.append(self._stored(group))
        actions, queued = self.core.requeue(route, dead, refused, time.monotonic(), time.time())
        self._perform([*actions, *map(Unbury, queued)])

    def _lacks_room(self, groups: list[GroupHeader]) -> bool:
        journal = self._journal
        return journal is not None and journal.tight and not journal.admits(groups)

    def _stored(self, dead: DeadGroup) -> StoredGroup:
        meta = dead.meta
        frames = tuple(map(bytes, dead.frames or ()))
        return StoredGroup(
            header=meta.header,
            env=meta.env,
            split=meta.split,
            run=meta.run,
            producer=meta.producer,
            session=meta.session,
            table=meta.table,
            body=GroupBody(frames, meta.header.nbytes),
            accepted_at=0.0,
            accepted_wall=meta.at,
            order=meta.order,
        )

    def _events_one(self) -> None:
        if self._door is None:
            frame = self._sockets.events.recv(zmq.NOBLOCK)
        else:
            whole = self._sockets.events.recv(zmq.NOBLOCK, copy=False)
            frame = whole.bytes
            if frame[:1] == b"\x00":
                self._sockets.events.setsockopt(zmq.UNSUBSCRIBE, frame[1:])
            elif frame[:1] == b"\x01":
                if not self._door.subscribes(whole, frame[1:]):
                    self._reject("events: forbidden")
                    return
                self._sockets.events.setsockopt(zmq.SUBSCRIBE, frame[1:])
        if frame[:1] == b"\x01":
            self._perform(self.core.subscribed(frame[1:]))

    def _publish_one(self) -> None:
        whole: list[zmq.Frame] = []
        if self._door is None:
            frames = receive_small(self._sockets.publish, EVENT_LIMIT_BYTES)
        else:
            whole = receive_small_frames(self._sockets.publish, EVENT_LIMIT_BYTES)
            frames = [frame.bytes for frame in whole]
        if len(frames) != 2 or not topics.is_forwarded(frames[0]):
            self._reject("publish: not forwarded")
            return
        if self._door is not None and not self._door.publishes(whole[0], frames[0]):
            self._reject("publish: forbidden")
            return
        try:
            codec.decode_event(frames[1])
        except WireError as error:
            self._reject(f"publish: {error.code.value}")
            return
        self._sockets.events.send_multipart(frames, zmq.NOBLOCK)

    def _perform(self, actions: Iterable[Action]) -> None:
        """Hand new events to the journal, and perform the actions that need not wait for it; defer the others.

        Peers wait for replies, so they go before what is published.
        """
        journal = self._journal
        if journal is None:
            for action in sorted(actions, key=_is_publication):
                self._do(action)
            return
        journal.append(self.core.events())
        for action in sorted(actions, key=_is_publication):
            if not action.durable or journal.done >= journal.ticket:
                self._deferred.sent(action)
                self._do(action)
            else:
                if self.core.disk_full and (last := self._deferred.last_durable_ack(action)) is not None:
                    self._do(last)
                self._deferred.defer(journal, action, time.monotonic())

    def _do(self, action: Action) -> None:
        match action:
            case Reply(route, message, frames):
                self._send_reply(route, message, frames)
            case Publish(topic, message):
                send_frames(self._sockets.events, (topic, codec.encode(message)))
            case Dropped(record):
                self._log("dropped.jsonl", self._logs.dropped, record)
            case Recorded(batch):
                self._log("settled.jsonl", self._logs.settled, batch)
            case Expired():
                self._stale_log.note(action)
            case Bury(group, frames, reason):
                self._dead.bury(group, frames, reason, time.time())
            case Unbury(order):
                self._dead.remove(order)

    def _log(self, name: str, log: LineSink, record: DroppedGroup | SettledBatch) -> None:
        """Write a line; a full disk only counts."""
        try:
            log.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            self._count(self.unsent, f"{name}: {error.strerror}")

    def _send_reply(self, route: Route, message: ReplyMessage, frames: tuple[Any, ...] = ()) -> None:
        try:
            send_frames(self._sockets.serve, (*route, codec.encode(message), *frames))
        except zmq.ZMQError as error:
            if error.errno not in {errno.EHOSTUNREACH, errno.EAGAIN}:
                raise
            reply = type(message).__name__
            if error.errno == errno.EHOSTUNREACH:
                # Nothing is lost: what the reply hands out stays leased until the lease ends.
                self._count(self.unsent, f"{reply}: the peer is gone", "reply not sent", logging.INFO)
            else:
                self._count(self.unsent, f"{reply}: {error.strerror}", "reply not sent")

    def _reject(self, reason: str) -> None:
        self.core.rejected(reason)
        self._count(self.rejections, reason)

    def _count(
        self,
        counts: dict[str, int],
        reason: str,
        what: str = "message dropped",
        level: int = logging.WARNING,
    ) -> None:
        count = counts[reason] = counts.get(reason, 0) + 1
        if count & (count - 1) == 0:  # a repeating peer must not fill the log
            logger.log(level, "%s reason=%s count=%d", what, reason, count)
