"""Sender: serves the versions of one segment to receivers, each in a thread of its own.

    accept thread -> handshake -> FOLLOW ... OFFER, chunks, DONE ... FOLLOW

A connection ends `SESSION_S` after its handshake, between two transfers. The receiver then gets a new ticket, or none
if its key was revoked. Connections are bounded, those in their handshake apart from those that have proven a ticket:
silent strangers take no place from receivers.

Loss: none that matters. A transfer that breaks off leaves the receiver what it has, and the next one sends the rest.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Final

import msgspec

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.transport.keys import ticket
from rolloutmq.schemas.errors import AddressInUseError, RolloutMQError, WeightsNotSentError
from rolloutmq.trainer.weights.stream.ahead import ahead
from rolloutmq.trainer.weights.stream.channel import LOADED, Channel, Loaded
from rolloutmq.trainer.weights.stream.chunks import Digests, unknown
from rolloutmq.trainer.weights.stream.chunks import decoded as decoded_table
from rolloutmq.trainer.weights.stream.messages import (
    CHUNK,
    Done,
    Follow,
    Kind,
    Offer,
    Take,
    decoded,
    table_sum,
    take_limit,
)
from rolloutmq.trainer.weights.stream.snapshots import LOOK_S, Snapshot, Snapshots
from rolloutmq.trainer.weights.stream.whole import send_whole

logger = logging.getLogger(__name__)

SESSION_S: Final = 60.0
"""Seconds after which a receiver needs a new ticket; a revoked key gets no version that begins later."""
IDLE_S: Final = 2.0
"""Pause between two signs of life to a receiver that waits."""
RECEIVERS: Final = 64
STRANGERS: Final = 64
"""Connections in their handshake."""
BACKLOG: Final = 128


class Sender:
    """The server of one run directory's weights. Close it.

    Args:
        snapshots: The weights.
        host, port: Address to bind; port 0 takes any.
        sealed: Encrypt the transfers.

    Raises:
        AddressInUseError: The port is taken.
        PackageMissingError: Transfers cannot be encrypted.
    """

    def __init__(self, snapshots: Snapshots, host: str, port: int, *, sealed: bool) -> None:
        self.secret = ticket.new_secret()
        self.sealed = sealed
        self._snapshots = snapshots
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise AddressInUseError(f"{host}:{port}", str(error)) from None
        self.port = int(self._listener.getsockname()[1])
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._strangers: set[socket.socket] = set()
        self._receivers: dict[Channel, str] = {}
        self._threads: set[threading.Thread] = set()
        self._throttle = LogThrottle()
        self._accepting = threading.Thread(target=self._accept, name="weights-sender")
        self._accepting.start()

    def receivers(self) -> list[str]:
        """Return the names of the receivers that are connected now."""
        with self._lock:
            return sorted(self._receivers.values())

    def close(self) -> None:
        """End all transfers and wait for their threads."""
        self._stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
            for sock in self._strangers:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for channel in self._receivers:
                channel.interrupt()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._stopping.wait(0.05):  # out of descriptors, perhaps
                    self._complain(f"accept: {error}")
                continue
            with self._lock:
                full = len(self._strangers) >= STRANGERS or self._stopping.is_set()
                if not full:
                    self._strangers.add(sock)
            if full:
                sock.close()
                self._complain(f"more than {STRANGERS} connections without a ticket")
                continue
            peer = f"{address[0]}:{address[1]}"
            thread = threading.Thread(target=self._serve, args=(sock, peer), name=f"weights to {peer}")
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            self._serve_receiver(sock, peer)
        except RolloutMQError as error:
            self._complain(f"{peer}: {error}")
        except Exception:
            logger.exception("transfer failed peer=%s", peer)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _serve_receiver(self, sock: socket.socket, peer: str) -> None:
        shown: list[ticket.Ticket] = []

        def key_of(data: bytes) -> bytes:
            shown.append(ticket.read(data, time.time()))
            return ticket.key_of(self.secret, data)

        try:
            channel = Channel.accept(sock, peer, key_of, sealed=self.sealed)
        finally:
            with self._lock:
                self._strangers.discard(sock)
        name = shown[0].name
        try:
            with self._lock:
                if len(self._receivers) >= RECEIVERS or self._stopping.is_set():
                    self._complain(f"more than {RECEIVERS} receivers, refused name={name}")
                    return
                self._receivers[channel] = name
            Transfers(channel, self._snapshots, self._stopping, name).run(time.monotonic() + SESSION_S)
        finally:
            with self._lock:
                self._receivers.pop(channel, None)
            channel.close()

    def _complain(self, why: str) -> None:
        if not self._stopping.is_set() and self._throttle.is_due(why.partition(": ")[2], time.monotonic()):
            logger.warning("receiver not served reason=%s", why)


class Transfers:
    """The transfers of one connection."""

    def __init__(self, channel: Channel, snapshots: Snapshots, stopping: threading.Event, name: str) -> None:
        self._channel = channel
        self._snapshots = snapshots
        self._stopping = stopping
        self._name = name

    def run(self, until: float) -> None:
        """Answer the receiver until `until`, or until asked to stop. Blocks; raises what a channel raises."""
        while True:
            try:
                asked = self._channel.receive()
            except WeightsNotSentError:
                return  # it has left between two transfers
            if asked.kind is not Kind.FOLLOW:
                return
            snapshot = self._awaited(decoded(asked.body, Follow).write, until)
            if snapshot is None:
                self._channel.send(Kind.RENEW)
                return
            try:
                self._transfer(snapshot)
            finally:
                self._snapshots.release(snapshot)

    def _awaited(self, write: str, until: float) -> Snapshot | None:
        told = time.monotonic()
        while (found := self._snapshots.newer(write)) is None:
            if self._stopping.wait(LOOK_S) or time.monotonic() > until:
                return None
            if time.monotonic() > told + IDLE_S:
                told = time.monotonic()
                self._channel.send(Kind.IDLE)
        return found

    def _transfer(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        nbytes = snapshot.nbytes
        offer = Offer(
            write=snapshot.write,
            version=snapshot.version,
            layout=snapshot.layout,
            manifest_bytes=len(snapshot.encoded),
            nbytes=nbytes,
            run_id=self._snapshots.run_id,
        )
        self._channel.send(Kind.OFFER, msgspec.msgpack.encode(offer))
        answer = self._channel.receive(take_limit(nbytes))
        if answer.kind is not Kind.TAKE:
            return
        take = decoded(answer.body, Take)
        if take.manifest:
            self._channel.send(Kind.MANIFEST, snapshot.encoded)
        if snapshot.whole and not take.resumes:
            sent, table = send_whole(self._channel, snapshot), None
        else:
            sent = self._send_chunks(snapshot, take)
            table = table_sum(snapshot.table())
            self._snapshots.learn(snapshot)
        done = Done(sent=sent, same=len(snapshot) - sent, table=table)
        self._channel.send(Kind.DONE, msgspec.msgpack.encode(done))
        logger.info(
            "weights sent name=%s version=%d.%d chunks=%d of=%d seconds=%.3f",
            *(self._name, *msgspec.structs.astuple(snapshot.version), sent, len(snapshot)),
            time.monotonic() - began,
        )

    def _send_chunks(self, snapshot: Snapshot, take: Take) -> int:
        """Send the chunks that the receiver does not have; return their number.

        Another thread makes digests and ciphers of the next chunks while this one waits for the network.
        """
        theirs = decoded_table(take.digests, len(snapshot))
        known = unknown(len(snapshot)) if theirs is None else theirs
        sent = 0
        with closing(ahead(self._loaded(snapshot, known), LOADED, "weights-loader")) as chunks:
            for loaded in chunks:
                self._channel.unload(loaded)
                sent += 1
        return sent

    def _loaded(self, snapshot: Snapshot, theirs: Digests) -> Iterator[Loaded]:
        for index in range(len(snapshot)):
            with snapshot.chunk(index) as data:
                mine = snapshot.digest(index)
                if mine == theirs.item(index):
                    continue
                loaded = self._channel.load(Kind.CHUNK, CHUNK.pack(index, *mine[:2]), data)
            yield loaded
