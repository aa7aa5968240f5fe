"""Relay: the process that serves the weights of a run directory to other hosts, and gets them from another host.

    trainer's host   weights.json (trainer)  ->  relay: sender
    another host     relay: receiver  ->  weights.json (relay)  ->  engines; with `listen` also a sender for more relays

Beside a trainer it only reads; without one it owns the weights. It imports no torch, and works with any run directory.
A source that is away, or refuses, is tried again without end; the log says why. A missing package ends it.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Final

from rolloutmq.bus.lifecycle import log_failure, set_up_logging, signals
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.schemas.errors import ConfigError, PackageMissingError, RolloutMQError
from rolloutmq.schemas.files import RelayState, RunLayout, StreamAddress
from rolloutmq.schemas.network.address import host_and_port, is_loopback
from rolloutmq.schemas.printable import printable
from rolloutmq.trainer.weights.stream.channel import Channel, require_cipher
from rolloutmq.trainer.weights.stream.presence import Presence
from rolloutmq.trainer.weights.stream.receiver import Receiver
from rolloutmq.trainer.weights.stream.sender import Sender
from rolloutmq.trainer.weights.stream.snapshots import Snapshots
from rolloutmq.trainer.weights.stream.sources import BrokerSource, RunSource, Source

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.1
LAST_PAUSE_S: Final = 2.0
"""Pauses between two attempts to reach a source; each is twice the one before."""


class Following:
    """A receiver that follows a source, until asked to stop."""

    def __init__(self, layout: RunLayout, source: Source) -> None:
        self._source = source
        self._receiver = Receiver(layout)
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self._throttle = LogThrottle()
        self._waits_for = "a connection to the sender"

    def state(self, number: int) -> RelayState:
        """Return what the relay has and waits for; for any thread."""
        return RelayState(
            number=number,
            version=self._receiver.holds,
            waits_for=self._waits_for,
            run_id=self._receiver.run_id,
        )

    def stop(self) -> None:
        """Ask `run` to end; for any thread, and for a signal handler."""
        self._stopping.set()
        if (channel := self._channel) is not None:
            channel.interrupt()

    def run(self) -> None:
        """Follow the source until asked to stop. Blocks.

        Raises:
            PackageMissingError: The weights are encrypted, and the package for it is not installed.
        """
        pause = FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                self._channel = self._source.dial()
                pause, self._waits_for = FIRST_PAUSE_S, ""
                if self._stopping.is_set():
                    break
                self._receiver.follow(self._channel)
            except PackageMissingError:
                raise
            except RolloutMQError as error:
                self._waits_for = printable(str(error))
                self._complain(str(error))
                self._stopping.wait(pause)
                pause = min(2 * pause, LAST_PAUSE_S)
            finally:
                if self._channel is not None:
                    self._channel.close()
                self._channel = None

    def close(self) -> None:
        """Release the weights; they stay for the engines and for the next life."""
        self._receiver.close()

    def _complain(self, why: str) -> None:
        if not self._stopping.is_set() and self._throttle.is_due(why, time.monotonic()):
            logger.warning("waiting for=weights reason=%s", why)


def serving(layout: RunLayout, listen: str, *, insecure: bool) -> tuple[Sender, Snapshots]:
    """Serve the weights of a run directory, and publish the address. Close both, the sender first.

    Raises:
        PackageMissingError: Other hosts can reach the address, and the package that encrypts is not installed.
        ConfigError, AddressInUseError: The address is none, or it is taken.
    """
    if (parts := host_and_port(listen)) is None:
        raise ConfigError("weights.listen", f"must be tcp://HOST:PORT (got {listen!r}); port 0 takes any")
    host, port = parts
    sealed = not (insecure or is_loopback(host))
    if sealed:
        require_cipher()
    snapshots = Snapshots(layout.weights, run_id=run_id_of(layout))
    sender = Sender(snapshots, host, port, sealed=sealed)
    own = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host
    address = StreamAddress(
        host=own, port=sender.port, secret=sender.secret, sealed=sealed, sender=SegmentOwner.current()
    )
    try:
        write_json(layout.stream, address)
    except BaseException:
        sender.close()
        raise
    logger.info("serving weights address=%s:%d sealed=%s", host, sender.port, sealed)
    return sender, snapshots


def main(run_dir: Path, source: Path | None = None, listen: str = "", behind: str = "") -> int:
    """Run a relay as a process; return its exit code. Blocks.

    Args:
        run_dir: Run directory of this host.
        source: Run directory whose relay sends the weights. Without it the run's relay sends them if the directory is
            that of a run of another host, else a trainer of this host writes them.
        behind: Name of a relay of a third host that sends them in place of the run's.
        listen: Address to serve them at; by default `weights.listen` beside a trainer, and none for received ones.
    """
    set_up_logging()
    try:
        run(run_dir, source, listen, behind)
    except Exception as error:  # noqa: BLE001 - the task boundary of the process
        return log_failure("relay", error)
    return 0


def run(run_dir: Path, source: Path | None, listen: str, behind: str = "") -> None:
    """Run a relay until a signal. Blocks; raises what `serving` and `Receiver` raise."""
    config, layout = load_run(run_dir)
    stopping = threading.Event()
    found = _source(layout, source, behind)
    following = Following(layout, found) if found is not None else None

    def stop(reason: str) -> None:
        logger.info("stopping reason=%s", reason)
        stopping.set()
        if following is not None:
            following.stop()

    where = listen or ("" if following is not None else config.weights.listen)
    served = serving(layout, where, insecure=config.weights.insecure) if where else None
    try:
        with signals(stop):
            if following is None:
                stopping.wait()
            else:
                with Presence(layout, following.state):
                    following.run()
    finally:
        if served is not None:
            for part in served:
                part.close()
            layout.stream.unlink(missing_ok=True)
        if following is not None:
            following.close()


def _source(layout: RunLayout, source: Path | None, behind: str) -> Source | None:
    """Return where the weights come from; None if a trainer of this host writes them."""
    if source is not None:
        return RunSource(RunLayout(source), layout.root.name)
    return BrokerSource(layout, behind) if layout.connection.exists() else None
