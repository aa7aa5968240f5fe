"""Factories of all sockets of the bus, each with an argument why no loss goes unnoticed.

A factory sets the options of a socket; client factories also connect it. No option is a guarantee: a high-water mark
bounds a pipe but not the kernel's buffers, a clean close loses messages, and a publisher drops. The layer above acks or
repeats whatever must arrive; the docstring of each factory names it.

Sockets are not thread-safe: a socket belongs to the thread, or to the event loop, that created it.
"""

import asyncio
import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import zmq

from rolloutmq.bus.transport.keys.bundle import CurveKeys
from rolloutmq.bus.transport.keys.handshakes import Handshakes
from rolloutmq.bus.transport.way.families import families
from rolloutmq.schemas.errors import AddressInUseError, ClosedError, ConfigError

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks who may enter: RFC 27."""
ZAP_DOMAIN: Final = b"rolloutmq"
LOCAL_THREAD: Final = 1
"""Thread of the broker's sockets for clients of this host, as a bit."""
REMOTE_THREAD: Final = 2
"""That for clients of other hosts: a flood of their handshakes takes all of it, and nothing from the others."""

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

BULK_HWM: Final = 64
"""Messages in a pipe of the data plane. It is small because a message may have megabytes and credit bounds the bytes
exactly; with fewer, small groups stall on wake-ups."""
CONTROL_HWM: Final = 1000
"""Messages in a pipe of small control messages."""
HANDSHAKE_MS: Final = 5000
"""Time after which a peer of this host that does not speak ZMTP is disconnected."""
TCP_HANDSHAKE_MS: Final = 120_000
"""The same by TCP, where a fleet may knock at once: the broker makes all handshakes side by side, some 800 for a second
of a core. If they outlast the limit of either side, all are given up, none succeeds, and the fleet knocks again."""
ARRIVALS_HWM: Final = 8
"""Messages with groups in a pipe from a producer of another host, each up to 1 MiB by its own rule. The broker holds
them beside its mark while it is busy; what finds no room waits with its producer."""
REPLIES_HWM: Final = 32
"""Replies in a pipe to a client of another host: it asks for few things at once, and each may be a batch or a group. A
client that reads nothing would else hold a thousand of them in the broker's memory."""
RECONNECT_MS: Final = 50
"""First pause before a lost connection is tried again; it doubles."""
RECONNECT_MAX_MS: Final = 1000
CONNECT_MS: Final = 5000
"""Time limit of a TCP connection attempt; that of the system is minutes."""
LINGER_MS: Final = 500
"""Time for the last replies and events to leave when a socket closes."""
BACKLOG: Final = 1024
"""Pending connections: a thousand producers reconnect at once to a restarted broker."""
KEEPALIVE_IDLE_S: Final = 30
"""Silence after which a TCP peer is probed; for ipc the kernel reports the end of a peer."""
KEEPALIVE_INTERVAL_S: Final = 10
KEEPALIVE_PROBES: Final = 3
"""Unanswered probes before a peer counts as dead: one minute in total, instead of the system's eleven."""
HEARTBEAT_MS: Final = 5000
"""Time between two heartbeats of a connection of `events` or `publish` by TCP; see `_hear`."""
SILENCE_MS: Final = 15000
"""Silence after a heartbeat that ends such a connection: four retransmissions in a row on a way of 200 ms."""
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)
"""As plain integers: operators of an enumeration cost as much as a call of the library."""
_send: Final = zmq.backend.Socket.send
"""Without the layer of `zmq.Socket.send` above it, which serves kinds of sockets that the bus has not."""
_ONE_WAY: Final = frozenset({zmq.PUB, zmq.SUB, zmq.XPUB, zmq.XSUB})


def make_context(io_threads: int = 1) -> Context:
    """Create a context; the caller ends it with `term()` after closing its sockets."""
    return zmq.Context(io_threads)


class Shared:
    """One context for all clients of this process that have many sockets with little traffic; for any thread.

    A context has one or two threads: a thousand contexts would spend more time on wake-ups than on messages. It ends
    with its last user. A forked child creates its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._users = 0
        self._pid = 0

    def borrow(self) -> Context:
        """Return the context; call `give_back` once, after closing all its sockets."""
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
    """The context of a client: its own, which ends with the client, or a borrowed one, which stays."""

    def __init__(self, lent: Context | None) -> None:
        self.context = make_context() if lent is None else lent
        self._owned = lent is None

    def connect(self, maker: Callable[..., Socket], *args: Any) -> Socket:
        """Create a socket in this context; if that fails, end the context."""
        try:
            return maker(self.context, *args)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Terminate the client's own context, whose sockets must be closed. May be called twice."""
        if self._owned:
            self.context.term()


def ingest_pull(context: Context, max_frame_bytes: int) -> Socket:
    """Create the broker's PULL socket for groups.

    Loss: a dying broker loses its queue, and a peer that flushes and closes may lose messages. A group counts only
        after
    its ack: the producer's spool keeps and resends it until then. Full: the pipe stops reading, the kernel's buffer
    fills and the producer's PUSH blocks. A frame above `max_frame_bytes` disconnects its sender before it is allocated;
    the limit is for one frame, so the reader adds them up.
    """
    return _made(context, zmq.PULL, hwm=BULK_HWM, linger_ms=0, max_frame_bytes=max_frame_bytes)


def serve_router(context: Context, max_frame_bytes: int) -> Socket:
    """Create the broker's ROUTER socket for requests.

    Loss: a request or a reply may be lost with its connection; the client repeats the request, and every request is
    repeatable. With ROUTER_MANDATORY a reply to a peer that left or does not read is an error, which the broker counts,
    instead of a silent drop. Full: the send fails with EAGAIN, and the broker drops and counts the reply; it never
    blocks.
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
    """Create the broker's XPUB socket for events.

    Loss: it drops events for slow subscribers and for those not subscribed yet. Therefore it carries only repeated
        state
    (acks, pressure, control) and numbered samples. XPUB_VERBOSE reports every subscription, also a second one to a
    topic, so the broker can send the last state to each new subscriber.
    """
    socket = _made(context, zmq.XPUB, hwm=CONTROL_HWM, linger_ms=LINGER_MS, max_frame_bytes=1 << 10)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    return socket


def publish_xsub(context: Context, max_frame_bytes: int) -> Socket:
    """Create the broker's XSUB socket, to which other services publish. Loss: as for their PUB; see `publisher`."""
    return _made(context, zmq.XSUB, hwm=CONTROL_HWM, linger_ms=0, max_frame_bytes=max_frame_bytes)


def producer_push(context: Context, address: str, keys: CurveKeys | None = None) -> Socket:
    """Create and connect a producer's PUSH socket.

    Loss: a killed broker loses up to two high-water marks of messages and the kernel's buffers, without an error. The
    spool keeps every group until its ack; linger is 0 because unsent groups are unacked too. Full, or without a broker
    (IMMEDIATE): a send blocks, or raises Again with NOBLOCK.
    """
    socket = _made(context, zmq.PUSH, hwm=BULK_HWM, linger_ms=0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    return _connected(socket, address, keys)


def client_dealer(context: Context, address: str, keys: CurveKeys | None = None) -> Socket:
    """Create and connect a client's DEALER socket.

    Loss: a request or reply may be lost with the connection; the client repeats the request until it has a reply with
        its
    correlation frame. IMMEDIATE: nothing is queued while there is no broker, so a restarted broker gets no old
    requests. Full: Again with NOBLOCK.
    """
    socket = _made(context, zmq.DEALER, hwm=CONTROL_HWM, linger_ms=0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    return _connected(socket, address, keys)


def subscriber(
    context: Context, address: str, topics: Iterable[bytes], keys: CurveKeys | None = None
) -> Socket:
    """Create and connect a SUB socket with subscriptions to the prefixes.

    Loss: it misses events published before its subscription arrived, while disconnected, and while its queue is full.
        The
    broker repeats state on subscription and at intervals; samples have numbers. IMMEDIATE is off: with it, libzmq 4.3.5
    never sends subscriptions made before the connection exists.
    """
    socket = _made(context, zmq.SUB, hwm=CONTROL_HWM, linger_ms=0)
    for topic in topics:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    return _connected(socket, address, keys)


def publisher(context: Context, address: str, keys: CurveKeys | None = None) -> Socket:
    """Create a service's PUB socket, connected to the broker's `publish`.

    Loss: it drops events while there is no broker, before the broker's subscription arrives, and above the high-water
    mark; it never blocks. It carries only numbered telemetry and progress, which later events supersede.
    """
    socket = _made(context, zmq.PUB, hwm=CONTROL_HWM, linger_ms=LINGER_MS)
    return _connected(socket, address, keys)


def bind_local(socket: Socket, address: str) -> None:
    """Bind a socket of the broker for clients of this host.

    Raises:
        AddressInUseError: The address is taken.
        ConfigError: It cannot be bound.
    """
    socket.setsockopt(zmq.AFFINITY, LOCAL_THREAD)
    _bound(socket, [address])


def bind_remote(socket: Socket, addresses: Sequence[str], secret: str) -> str:
    """Bind a socket of the broker to the first free address, for clients of other hosts; return that address.

    The options hold for this address alone: libzmq copies them to a listener as it is bound.

    Args:
        socket: A socket in a context with two threads.
        addresses: Addresses `tcp://HOST:PORT`, the port `*` for any.
        secret: Secret key of the broker; the ZAP handler of the context decides who may enter. Empty lets everybody
            enter, without encryption.

    Raises:
        AddressInUseError: All addresses are taken.
        ConfigError: One cannot be bound.
    """
    socket.setsockopt(zmq.AFFINITY, REMOTE_THREAD)
    socket.setsockopt(zmq.HANDSHAKE_IVL, TCP_HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, int(addresses[0].startswith("tcp://[")))
    _hear(socket)
    kind = socket.getsockopt(zmq.TYPE)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.SNDHWM, REPLIES_HWM)
    elif kind == zmq.PULL:
        socket.setsockopt(zmq.RCVHWM, ARRIVALS_HWM)
    if secret:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody enters
    _bound(socket, addresses)
    return address_of(socket)


def zap_router(context: Context) -> Socket:
    """Create the socket at which libzmq asks who may enter.

    Loss: none within a process. A ROUTER, so that an unanswered question does not keep the next one from its answer.
    """
    socket = _made(context, zmq.ROUTER, hwm=0, linger_ms=0)
    socket.bind(ZAP_ADDRESS)
    return socket


def address_of(socket: Socket) -> str:
    """Return the last address that a socket was bound to."""
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()


def _bound(socket: Socket, addresses: Sequence[str]) -> None:
    """Bind to the first free address."""
    for address in addresses:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError("broker.listen", f"cannot bind {address}: {error.strerror}") from None
        else:
            return
    raise AddressInUseError(addresses[-1])


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


def _hear(socket: Socket) -> None:
    """Let the next TCP connections of a socket end when the other side is silent, if it carries events.

    Events go one way: a side that only waits would never learn that the way is gone, as a middlebox that forgot the
    connection still answers the kernel's probes. Requests are repeated and groups resent by their clients, which then
    connect anew. Those sockets have no heartbeats: they would wait behind megabytes, and end the connection of every
    producer that the broker makes wait.
    """
    if socket.getsockopt(zmq.TYPE) in _ONE_WAY:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


def _connected(socket: Socket, address: str, keys: CurveKeys | None) -> Socket:
    if address.startswith("tcp://"):
        socket.setsockopt(zmq.HANDSHAKE_IVL, TCP_HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, int(families.is_ipv6(address)))
        _hear(socket)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(address, f"cannot connect to this address: {error.strerror}") from None
    return socket


def send_frames(socket: Socket, frames: Sequence[Any], *, copy: bool = True) -> None:
    """Send one message; raise zmq.Again if the socket does not accept it now.

    Without the checks of `send_multipart`, which cost more than a small message.
    """
    for frame in frames[:-1]:
        _send(socket, frame, _MORE | _NOBLOCK, copy)
    _send(socket, frames[-1], _NOBLOCK, copy)


def receive_frames(socket: Socket) -> list[zmq.Frame]:
    """Receive one message as frames that view the library's memory; raise zmq.Again if there is none now."""
    frame: zmq.Frame = socket.recv(_NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:  # `recv_multipart` asks the socket instead, which costs three times as much
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame)
    return frames


shared: Final = Shared()
"""The context of the producers of this process."""


class Channel:
    """One socket in an event loop: wait for readiness, then act without blocking.

    A wait takes nothing from the socket, so a cancelled wait loses no message. ZMQ_FD is edge-triggered, and any call
    on the socket may consume the edge. Therefore every call goes through this class and checks the socket's state
    afterwards if a task waits; a task that starts to wait checks it first. Several tasks of one loop may wait. All
    methods raise ClosedError once the channel is closed.
    """

    def __init__(self, socket: Socket, handshakes: Handshakes | None = None) -> None:
        self._socket = socket
        self._closed = False
        self._handshakes = handshakes
        self._retry: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._take: Callable[[list[zmq.Frame]], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        self._news = handshakes.fd if handshakes is not None else -1
        if handshakes is not None:
            self._loop.add_reader(self._news, self._shake)
            self._shake()

    @property
    def problem(self) -> str:
        """What the last handshake failed for; empty if it did not."""
        return self._handshakes.problem if self._handshakes is not None else ""

    @property
    def is_writable(self) -> bool:
        """Whether the socket accepts a message now."""
        return not self._closed and bool(self._look() & zmq.POLLOUT)

    def on_message(self, take: Callable[[list[zmq.Frame]], None]) -> None:
        """Hand every message to a function, as frames that view the library's memory; nobody else may receive.

        It is called in the turn of the loop in which the message has come: a task that waits for the socket gets its
        turn later, and each turn costs a small message much of its time. The next message is handed over in the next
        turn, after whoever waits for this one.
        """
        self._take = take
        self._on_readable()

    def try_send(self, frames: Sequence[Any], *, copy: bool = True) -> bool:
        """Send one message if the socket accepts it now; return whether it did."""
        self._check_open()
        try:
            send_frames(self._socket, frames, copy=copy)
        except zmq.Again:
            return False
        finally:
            if self._waiting or self._take is not None:
                self._look()
        return True

    def try_receive(self) -> list[bytes] | None:
        """Receive one message, or None if there is none now."""
        self._check_open()
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        finally:
            if self._waiting:
                self._look()

    async def send(self, frames: Sequence[Any], *, copy: bool = True) -> None:
        """Send one message; wait while the socket is full or not connected. Cancelled: nothing was sent."""
        while not self.try_send(frames, copy=copy):
            await self.ready(zmq.POLLOUT)

    async def receive(self) -> list[bytes]:
        """Receive the next message. Cancelled: nothing was received."""
        while True:
            await self.ready(zmq.POLLIN)  # checking first costs less than a failed receive
            if (message := self.try_receive()) is not None:
                return message

    async def ready(self, events: int) -> None:
        """Wait until the socket can do one of `events` (POLLIN, POLLOUT)."""
        self._check_open()
        events = int(events)
        if self._look() & events:
            return
        entry = (events, self._loop.create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)

    def close(self) -> None:
        """Close the socket; waiting tasks raise ClosedError. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._handshakes is not None:
            self._loop.remove_reader(self._news)
            self._handshakes.close()
        if self._retry is not None:
            self._retry.cancel()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(ClosedError())
        self._socket.close()

    def _shake(self) -> None:
        """Take the news of the handshakes; connect anew where that is due."""
        assert self._handshakes is not None
        now = time.monotonic()
        self._handshakes.look(now)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._handshakes.due < math.inf:
            self._retry = self._loop.call_later(self._handshakes.due - now, self._shake)
        if self._waiting:
            self._look()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError

    def _on_readable(self) -> None:
        """Hand over what has come, and wake the tasks that wait."""
        took = self._take is not None and self._hand_over(self._take)
        if self._closed:
            return
        if self._waiting:
            self._look()
        elif took:
            # In the next turn: the task that gets the message goes first.
            self._loop.call_soon(self._look_again)
        elif self._take is None:
            self._events()  # nobody waits for this news; if nobody took it, it would wake the loop in every turn

    def _hand_over(self, take: Callable[[list[zmq.Frame]], None]) -> bool:
        """Hand over the next message; return whether there was one."""
        if self._closed:
            return False
        try:
            frames = receive_frames(self._socket)
        except zmq.Again:
            return False
        take(frames)
        return True

    def _look_again(self) -> None:
        if not self._closed:
            self._look()

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _look(self) -> int:
        events = self._events()
        if self._take is not None and events & _READABLE:
            self._loop.call_soon(self._on_readable)  # it came since the last receive, and the edge is taken
        for wanted, future in self._waiting:
            if wanted & events and not future.done():
                future.set_result(None)
        return events
