"""Makers of every socket of the bus, each with the argument why what it carries cannot vanish unseen.

A maker sets the options and neither binds nor connects what it is not told to. No option here is a promise: a
high-water mark bounds a pipe and not what lies in the kernel, a clean close loses messages, a publisher drops. What
must arrive is acked or repeated by the layer above, and the docstrings say by which.

Sockets are not thread-safe: one belongs to the thread, or to the event loop, that made it.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import zmq

from rolloutmq.schemas.errors import ClosedError, ConfigError

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

BULK_HWM: Final = 64
"""Messages in a pipe of the data plane. Small, since each may be megabytes and credits do the exact bounding; with
fewer, small groups stall on wake-ups."""
CONTROL_HWM: Final = 1000
"""Messages in a pipe of small control messages."""
HANDSHAKE_MS: Final = 5000
"""A stranger that connects and does not speak ZMTP is cut off after this."""
RECONNECT_MS: Final = 50
"""First pause before a lost connection is tried again; doubles."""
RECONNECT_MAX_MS: Final = 1000
CONNECT_MS: Final = 5000
"""A TCP connection attempt into silence ends after this, instead of the minutes of the system."""
LINGER_MS: Final = 500
"""How long the broker's last replies and events may take to leave at its end."""
BACKLOG: Final = 1024
"""A thousand producers reconnect at once when a broker comes back."""
KEEPALIVE_IDLE_S: Final = 30
"""A silent TCP peer is probed after this; ipc needs none, the kernel reports the end of a peer."""
KEEPALIVE_INTERVAL_S: Final = 10
KEEPALIVE_PROBES: Final = 3
"""A host that vanished is given up after a minute in all, not after the eleven of the system."""


def make_context(io_threads: int = 1) -> Context:
    """Make a context; the caller ends it with `term()` after it closed its sockets."""
    return zmq.Context(io_threads)


class Shared:
    """One context for all in this process that have many sockets with little traffic each; for any thread.

    A context is a thread or two: a thousand of them spend more on waking each other than on what they carry. It ends
    with the last who uses it. A forked child makes one of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._users = 0
        self._pid = 0

    def borrow(self) -> Context:
        """Return the context; `give_back` it once, after all sockets that were made with it are closed."""
        with self._lock:
            if self._context is None or self._pid != os.getpid():
                self._context, self._users, self._pid = make_context(), 0, os.getpid()
                self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
            self._users += 1
            return self._context

    def give_back(self, context: Context) -> None:
        """End the use of a context that was borrowed in this process."""
        with self._lock:
            if context is not self._context or self._pid != os.getpid():
                return
            self._users -= 1
            if self._users:
                return
            self._context = None
        context.term()


class Scope:
    """The context of a client: its own, which ends with it, or one that was lent to it and stays."""

    def __init__(self, lent: Context | None) -> None:
        self.context = make_context() if lent is None else lent
        self._owned = lent is None

    def connect(self, maker: Callable[..., Socket], *args: Any) -> Socket:
        """Make a socket in this context; if that fails, so that the client never comes to be, end the context."""
        try:
            return maker(self.context, *args)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Terminate an own context, whose sockets are closed by now. May be called twice."""
        if self._owned:
            self.context.term()


def ingest_pull(context: Context, max_frame_bytes: int) -> Socket:
    """Make the broker's PULL that groups arrive on.

    Loss: whatever lies in its queue when the broker dies is gone, and so is some of what a peer flushed and closed.
    Nothing counts as sent before it is acked: the producer's spool keeps each group until then and sends it again.
    Full: the pipe stops taking, the kernel's buffer fills, the producer's PUSH blocks. A frame above
    `max_frame_bytes` disconnects its sender before it is allocated; the limit is per frame, so the reader counts.
    """
    return _made(context, zmq.PULL, hwm=BULK_HWM, linger_ms=0, max_frame_bytes=max_frame_bytes)


def serve_router(context: Context, max_frame_bytes: int) -> Socket:
    """Make the broker's ROUTER that answers requests.

    Loss: a request or a reply may vanish with its connection; the client repeats the request, and every request may
    be repeated. ROUTER_MANDATORY makes a reply to a peer that left, or that does not read, an error to be counted
    instead of a silent drop. Full: the sender gets EAGAIN, and the reply is dropped and counted; never blocks.
    """
    socket = _made(
        context,
        zmq.ROUTER,
        hwm=CONTROL_HWM,
        linger_ms=LINGER_MS,
        max_frame_bytes=max_frame_bytes,
    )
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def events_xpub(context: Context) -> Socket:
    """Make the broker's XPUB that events leave by.

    Loss: drops for a subscriber that does not keep up, and for one that is not subscribed yet. Hence it carries state
    that is repeated (acks, pressure, control) and samples that are numbered. XPUB_VERBOSE reports each subscription,
    also the second of a topic, so that the last state can be sent again to whoever came.
    """
    socket = _made(context, zmq.XPUB, hwm=CONTROL_HWM, linger_ms=LINGER_MS, max_frame_bytes=1 << 10)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    return socket


def publish_xsub(context: Context, max_frame_bytes: int) -> Socket:
    """Make the broker's XSUB that other services publish to. Loss: as that of their PUB; see `publisher`."""
    return _made(context, zmq.XSUB, hwm=CONTROL_HWM, linger_ms=0, max_frame_bytes=max_frame_bytes)


def producer_push(context: Context, address: str) -> Socket:
    """Make a producer's PUSH, connected.

    Loss: up to two high-water marks of messages and the kernel's buffers vanish with a killed broker, without an
    error. The spool keeps them until they are acked, therefore linger is 0: what is unsent at the end is unacked
    too. Full, or no broker there (IMMEDIATE): a send blocks, or raises Again with NOBLOCK.
    """
    socket = _made(context, zmq.PUSH, hwm=BULK_HWM, linger_ms=0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    return _connected(socket, address)


def client_dealer(context: Context, address: str) -> Socket:
    """Make a client's DEALER, connected.

    Loss: a request or reply may vanish with the connection; the client sends the same request again until it has an
    answer, and knows the answer by the correlation frame. IMMEDIATE: nothing is queued for a broker that is not
    there, so that none finds a heap of old requests when it comes back. Full: Again with NOBLOCK.
    """
    socket = _made(context, zmq.DEALER, hwm=CONTROL_HWM, linger_ms=0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    return _connected(socket, address)


def subscriber(context: Context, address: str, topics: Iterable[bytes]) -> Socket:
    """Make a SUB, connected and subscribed to the prefixes.

    Loss: misses what was published before its subscription arrived, while it was disconnected, and while its queue
    was full. The broker sends state again on subscription and in intervals; samples carry numbers. Not IMMEDIATE: with
    it, libzmq 4.3.5 never sends the subscriptions that were made before the connection stood.
    """
    socket = _made(context, zmq.SUB, hwm=CONTROL_HWM, linger_ms=0)
    for topic in topics:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    return _connected(socket, address)


def publisher(context: Context, address: str) -> Socket:
    """Make a service's PUB, connected to the broker's `publish`.

    Loss: drops while there is no broker, before the broker's subscription arrived, and above the high-water mark;
    never blocks. It carries only telemetry and progress, which are numbered and superseded by the next.
    """
    socket = _made(context, zmq.PUB, hwm=CONTROL_HWM, linger_ms=LINGER_MS)
    return _connected(socket, address)


def _made(context: Context, kind: int, *, hwm: int, linger_ms: int, max_frame_bytes: int = -1) -> Socket:
    socket = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM, hwm),
        (zmq.RCVHWM, hwm),
        (zmq.LINGER, linger_ms),
        (zmq.MAXMSGSIZE, max_frame_bytes),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        (zmq.CONNECT_TIMEOUT, CONNECT_MS),
        (zmq.BACKLOG, BACKLOG),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S),
        (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES),
    ):
        socket.setsockopt(option, value)
    return socket


def _connected(socket: Socket, address: str) -> Socket:
    socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(address, f"cannot be connected to: {error.strerror}") from None
    return socket


shared: Final = Shared()
"""What the producers of this process use."""


class Channel:
    """The asynchronous face of one socket: wait for readiness, then act without blocking.

    Nothing is taken from the socket while somebody waits, so a cancelled wait loses no message. ZMQ_FD is
    edge-triggered, and any call on the socket may swallow the edge: hence every call goes through here, and each
    looks at the socket's state afterwards if anybody waits for it; whoever begins to wait looks first. One event loop;
    several tasks may wait. All methods raise ClosedError once it is closed.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)

    def try_send(self, frames: Sequence[Any], *, copy: bool = True) -> bool:
        """Send one message if the socket takes it now."""
        self._check_open()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return False
        finally:
            if self._waiting:
                self._look()
        return True

    def try_receive(self) -> list[bytes] | None:
        """Take one message, or None if there is none now."""
        self._check_open()
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        finally:
            if self._waiting:
                self._look()

    def try_receive_frames(self) -> list[zmq.Frame] | None:
        """Take one message as frames that are views of what the library received, or None."""
        self._check_open()
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        finally:
            if self._waiting:
                self._look()

    async def send(self, frames: Sequence[Any], *, copy: bool = True) -> None:
        """Send one message; waits while the socket is full or nobody is connected. Cancelled: nothing was sent."""
        while not self.try_send(frames, copy=copy):
            await self.ready(zmq.POLLOUT)

    async def receive(self) -> list[bytes]:
        """Take the next message. Cancelled: nothing was taken."""
        while True:
            await self.ready(zmq.POLLIN)  # To look costs less than to be told that there is nothing.
            if (message := self.try_receive()) is not None:
                return message

    async def ready(self, events: int) -> None:
        """Wait until the socket can do one of `events` (POLLIN, POLLOUT)."""
        self._check_open()
        if self._look() & events:
            return
        entry = (events, self._loop.create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)

    def close(self) -> None:
        """Close the socket; whoever waits gets ClosedError. May be called twice."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(ClosedError())
        self._socket.close()

    def _check_open(self) -> None:
        if self._socket.closed:
            raise ClosedError

    def _look(self) -> int:
        events = int(self._socket.getsockopt(zmq.EVENTS))
        for wanted, future in self._waiting:
            if wanted & events and not future.done():
                future.set_result(None)
        return events
