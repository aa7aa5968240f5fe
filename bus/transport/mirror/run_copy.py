"""The directory of a run of another host: configuration, addresses of its broker and servers, files of its model.

Replies of the broker go in, files come out; the other host names no path. What it sends is checked: names by lists,
URLs by their form, sizes by limits. An engine is never set back: on a host that runs one itself, the file of the engine
is newer than what the broker has heard.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.engine_registry import SILENT_S, engine_files, is_engine
from rolloutmq.bus.files import PRIVATE_DIRECTORY, private_fd, write_private
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.shm.segment_file import remove_named
from rolloutmq.bus.transport.mirror.place import usable_url
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import (
    Connection,
    Endpoints,
    InferenceAddress,
    RunIdentity,
    RunLayout,
    WeightsAddress,
)
from rolloutmq.schemas.network.keys import Role, TokenRecord
from rolloutmq.schemas.wire.joining import SHARED_FILES, EngineState, HttpToken, RunReply, SharedFile

logger = logging.getLogger(__name__)

FOLDERS: Final = ("logs", "acks", "spools", "model")

_ROLES: Final = frozenset(Role)

Accept = Callable[[bytes, RunLayout], RunConfig]
"""Checks a configuration as the run tells it, and returns the one of this host; raises ConfigError to refuse it."""


class RunCopy:
    """One directory. Commands that share it have a configuration each: what an engine listens on is not a relay's.

    Args:
        layout: The directory, which exists.
        connection: How this host reaches the run.
        name: Name of the command whose configuration it is; empty for one that shares the directory with no others.
    """

    def __init__(self, layout: RunLayout, connection: Connection, name: str = "") -> None:
        self.layout = layout
        self._configs = [layout.config, *([layout.own_config(name)] if name else [])]
        self._marks: dict[str, str] = {}
        self._written: dict[str, tuple[tuple[int, int], float]] = {}
        """Inode and time of each engine's file as it was last seen to change, and when that was by this clock."""
        self._wrong = LogThrottle()
        for name in FOLDERS:
            (layout.root / name).mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        write_json(layout.connection, connection)

    def begin(self, run_id: str) -> None:
        """Note the run whose files come next. What another run has left here for it to find goes: weights, addresses.

        Programs of several commands may share the directory, each with a mirror: the first one that meets a fresh run
        removes these, so that no engine serves the weights of the run before.
        """
        self._marks.clear()
        with _alone(self.layout):
            known = run_id_of(self.layout)
            if known and known != run_id:
                logger.warning(
                    "weights and addresses of an earlier run are removed run_id=%s now=%s", known, run_id
                )
                self._drop()
            write_json(self.layout.identity, RunIdentity(run_id=run_id))

    def _drop(self) -> None:
        remove_weights(self.layout)
        left = [path for _, path in engine_files(self.layout)]
        for path in (*left, self.layout.relay, *(self.layout.model / name for name in SHARED_FILES)):
            path.unlink(missing_ok=True)

    def take_config(self, config: RunConfig) -> None:
        """Replace the configuration of the command. `config.json` is that of the last command, and for tools."""
        for path in self._configs:
            write_json(path, config)

    def take_token(self, token: str) -> Path | None:
        """Keep the token for the run's HTTP servers; return its file, None without a token."""
        if not token:
            self.layout.http_token.unlink(missing_ok=True)
            return None
        write_private(self.layout.http_token, token.encode())
        return self.layout.http_token

    def take_ca(self, certificates: str) -> Path | None:
        """Keep the certificates of the run's own authority; return their file, None without any."""
        if not certificates:
            self.layout.tls_ca.unlink(missing_ok=True)
            return None
        write_private(self.layout.tls_ca, certificates.encode())
        return self.layout.tls_ca

    def take_tokens(self, tokens: tuple[HttpToken, ...] | None) -> None:
        """Replace the tokens that servers of this host accept; None: they ask for none."""
        if tokens is None:
            self.layout.http_tokens.unlink(missing_ok=True)
            return
        # A newer version of the broker may have further roles: their holders may do nothing here.
        known = [one for one in tokens if one.role in _ROLES]
        records = [
            TokenRecord(name=one.name, role=Role(one.role), token=one.token, revoked=one.revoked)
            for one in known
        ]
        write_json(self.layout.http_tokens, records)

    def take_endpoints(self, endpoints: Endpoints) -> None:
        """Replace the addresses of the broker."""
        write_json(self.layout.endpoints, endpoints)

    def take_servers(self, reply: RunReply, address: str, now: float) -> None:
        """Replace the addresses of the inference servers and of the teacher.

        Args:
            reply: What the broker told.
            address: Where it was asked.
            now: Monotonic seconds.
        """
        told = [engine for engine in reply.engines if self._is_usable(engine, address)]
        for engine in told:
            self._take_engine(engine, address, now)
        self._forget(told, now)
        if url := usable_url(reply.teacher, address) if reply.teacher else "":
            _write_if_other(self.layout.teacher, InferenceAddress(url=url, pid=0, name="teacher"))
        else:
            self.layout.teacher.unlink(missing_ok=True)

    def missing(self, files: Iterable[SharedFile]) -> list[SharedFile]:
        """Return the files of the model that this host lacks, or has in another version."""
        return [one for one in files if one.name in SHARED_FILES and self._marks.get(one.name) != one.mark]

    def take_file(self, file: SharedFile, data: bytes) -> None:
        """Replace a file of the model; `data` is all of it."""
        path = self.layout.model / file.name
        written = path.with_name(f".{path.name}.tmp")
        write_private(written, data)
        written.replace(path)
        self._marks[file.name] = file.mark

    def _is_usable(self, engine: EngineState, address: str) -> bool:
        if is_engine(engine.name) and usable_url(engine.url, address):
            return True
        if self._wrong.is_due(f"{engine.name} {engine.url}", time.monotonic()):
            logger.warning(
                "engine left out, its name or URL is wrong name=%s url=%r", engine.name, engine.url
            )
        return False

    def _take_engine(self, engine: EngineState, address: str, now: float) -> None:
        path, url = self.layout.engine(engine.name), usable_url(engine.url, address)
        known = read_json(path, InferenceAddress) if path.exists() else None
        if known is not None and _is_newer(known, engine, url) and not self._is_left(path, now):
            return
        write_json(
            path,
            InferenceAddress(
                url=url,
                pid=engine.pid,
                name=engine.name,
                number=engine.number,
                at=engine.at,
                in_hand=engine.in_hand,
                busy=engine.busy,
                draining=engine.draining,
                trouble=engine.trouble,
                network=engine.network,
                run_id=engine.run_id,
                version=engine.version,
            ),
        )

    def _forget(self, told: Iterable[EngineState], now: float) -> None:
        """Remove engines that the run does not have any more. Those of this host itself write their files anew."""
        names = {engine.name for engine in told}
        for name, path in engine_files(self.layout):
            if name not in names and self._is_left(path, now):
                path.unlink(missing_ok=True)
                self._written.pop(path.name, None)

    def _is_left(self, path: Path, now: float) -> bool:
        """Return whether nobody has written a file for long: an engine of this host writes its own every second.

        Only changes are seen: the time of a file is by the clock of its server, which may be another host.
        """
        try:
            found = path.stat()
        except FileNotFoundError:
            self._written.pop(path.name, None)
            return True
        mark = found.st_ino, found.st_mtime_ns
        seen, at = self._written.setdefault(path.name, (mark, now))
        if seen != mark:
            self._written[path.name] = mark, now
            return False
        return now - at > SILENT_S


def remove_weights(layout: RunLayout) -> None:
    """Remove the weights that a relay has left in a directory. It must have ended; an engine keeps what it maps."""
    for address in (layout.weights, layout.stage):
        with suppress(msgspec.DecodeError):
            if (found := read_json(address, WeightsAddress)) is not None:
                remove_named(found)
        address.unlink(missing_ok=True)


def _is_newer(known: InferenceAddress, told: EngineState, url: str) -> bool:
    """Return whether a file is newer than what the run tells: the engine may be of this host, in its next life.

    Both times are by the clock of the engine's host.
    """
    is_same_life = (known.url, known.pid) == (url, told.pid)
    return known.number >= told.number if is_same_life else known.at > told.at


@contextmanager
def _alone(layout: RunLayout) -> Iterator[None]:
    """Keep the mirrors of other commands in this directory out during the block."""
    lock = private_fd(layout.identity.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write_if_other(path: Path, address: InferenceAddress) -> None:
    if not path.exists() or read_json(path, InferenceAddress) != address:
        write_json(path, address)
