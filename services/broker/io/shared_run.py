"""What the broker tells other hosts of its run directory, and what it writes there for their engines.

The core is without files: the data plane asks this class for the replies to `GetRun`, `GetFile`, `EngineBeat` and
`GetWeightsTicket`. The other side names no path. A file is one of `SHARED_FILES` in the directory of the policy's model
or tokenizer, an engine one of `inference.NAME`. Every read is bounded, and answers are reused for a moment: a thousand
hosts ask once a second.
"""

import hashlib
import logging
import math
import os
import re
from pathlib import Path
from typing import Final

import google_crc32c
import msgspec

from rolloutmq.bus.engine_registry import engine_files, engine_number, engines_of, is_of_other_host
from rolloutmq.bus.files import open_regular
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.tokenizer_fingerprint import student_directory, student_model
from rolloutmq.bus.transport.keys import ticket
from rolloutmq.bus.transport.keys.directory import hash_of_token
from rolloutmq.bus.transport.mirror.shared_config import shared
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import EndNotice, InferenceAddress, RunLayout, StreamAddress
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.joining import (
    CONFIG_LIMIT_BYTES,
    ENGINES_LIMIT,
    FILE_LIMIT_BYTES,
    KEYS_SHOWN,
    NETWORK_CHARS,
    PART_BYTES,
    SHARED_FILES,
    URL_CHARS,
    EngineBeat,
    EngineState,
    FilePart,
    GetFile,
    GetRun,
    GetWeightsTicket,
    HttpToken,
    JoinedEngine,
    JoiningRequest,
    KeyUse,
    RelayBeat,
    RunReply,
    SharedFile,
    WeightsTicket,
)
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.services.broker.broker_state import other_run, refuse
from rolloutmq.services.broker.io.relays import Relays
from rolloutmq.services.http_server.access import listed_keys
from rolloutmq.services.http_server.refusals import read_refusals
from rolloutmq.services.http_server.run_token import engine_token, http_token
from rolloutmq.services.http_server.tokens import OWN, Listed
from rolloutmq.services.process.clock_log import ClockLog

logger = logging.getLogger(__name__)

KEPT_S: Final = 0.25
"""Time for which a look at the files answers further requests."""
_SERVING: Final = frozenset({Role.ENGINE, Role.ADMIN})
"""Roles of keys that may have servers on other hosts."""
TAKEN_S: Final = 10.0
"""Silence of an engine after which one of another host may have its name."""
GONE_S: Final = 30.0
"""Silence after which the address of another host's engine is removed."""
_URL: Final = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")
_ANY: Final = {"0.0.0.0": "0.0.0.0", "::": "[::]", "": "0.0.0.0"}
"""Bound hosts that are told as they are: the asker puts in the one by which it reached the broker."""


class SharedRun:
    """The files of one run. For the thread of the data plane.

    Args:
        config: Configuration of the run.
        layout: Its directory.
        epoch: Epoch of the broker.
        run_id: Id of the run.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, epoch: int, run_id: str = "") -> None:
        self._config = config
        self._layout = layout
        self._epoch = epoch
        self._run_id = run_id
        self._shared = shared(config)
        if len(self._shared) > CONFIG_LIMIT_BYTES:
            raise ConfigError(
                "environment",
                f"the configuration has more than {CONFIG_LIMIT_BYTES} bytes; shorten `options`",
            )
        self._digest = hashlib.blake2b(self._shared, digest_size=16).hexdigest()
        self._reply: tuple[RunReply, float] | None = None
        self._keys = listed_keys(config)
        self._hashes: dict[str, tuple[tuple[HttpToken, ...], str]] = {}
        """Hashes and their digest, for each key that has asked."""
        self._own_token = http_token(config) if self._keys is not None else ""
        self._beats: dict[str, float] = {}
        """Time of the last heartbeat of each engine of another host."""
        self._owners: dict[str, str] = {}
        """Key that sends the heartbeats of an engine, as long as it is heard."""
        self._hosts: dict[str, tuple[str, str]] = {}
        """Host and network of each engine, as its heartbeats tell."""
        self._versions: dict[str, tuple[PolicyVersion | None, float]] = {}
        """Version of each engine, and the time when it told another one."""
        self._behind: dict[str, float] = {}
        """Time since which an engine is behind the newest version, as far as its state was asked for."""
        self.relays = Relays()
        self.clock_log = ClockLog(layout.clocks)
        self._has_looked = False

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._config.run.name

    def answer(
        self, request: JoiningRequest, now: float, sender: str = ""
    ) -> RunReply | FilePart | WeightsTicket | Ok | ErrorReply:
        """Serve one request.

        Args:
            request: The request.
            now: Monotonic seconds.
            sender: Name of the key that asks; empty without one.
        """
        match request:
            case GetRun():
                return self._run(request, now, sender)
            case GetFile():
                return self._part(request)
            case EngineBeat():
                return self._beat(request, now, sender)
            case RelayBeat():
                gone = other_run(self.name, self._run_id, request.run_id)
                return gone or self.relays.beat(request, now, sender)
            case GetWeightsTicket(relay=""):
                return self._ticket(sender)
            case GetWeightsTicket():
                return self.relays.ticket(request.relay, now, sender)

    def engines(self, now: float, newest: PolicyVersion) -> tuple[JoinedEngine, ...]:
        """Return the engines of other hosts that are heard, by name, beside the newest version of the trainer."""
        behind = {
            name for name, (version, _) in self._versions.items() if version is not None and version < newest
        }
        self._behind = {name: self._behind.get(name, now) for name in behind}
        return tuple(
            JoinedEngine(
                name=name,
                host=self._hosts.get(name, ("", ""))[0],
                key=self._owners.get(name, ""),
                silent_s=max(0.0, now - at),
                version=self._versions[name][0] if name in self._versions else None,
                unchanged_s=max(0.0, now - max(self._versions[name][1], self._behind[name]))
                if name in behind
                else 0.0,
            )
            for name, at in sorted(self._beats.items())[:KEYS_SHOWN]
        )

    def with_refused(self, keys: tuple[KeyUse, ...], now: float) -> tuple[KeyUse, ...]:
        """Return the use of keys with what the HTTP servers of the run have refused them."""
        found = read_refusals(self._layout.http_refused)
        used = [
            msgspec.structs.replace(key, refused={**key.refused, **found.pop(key.name).refused})
            if key.name in found
            else key
            for key in keys
        ]
        used += [
            KeyUse(name=name, role=self._role(name), silent_s=max(0.0, now - one.at), refused=one.refused)
            for name, one in sorted(found.items())
        ]
        return tuple(used[:KEYS_SHOWN])

    def _role(self, name: str) -> str:
        listed = self._keys.value if self._keys is not None else ()
        return next((key.role.value for key in listed if key.name == name and key.revoked is None), "")

    def sweep(self, now: float) -> None:
        """Remove the addresses of engines of other hosts that have been silent for long, and forget such relays.

        Those that an earlier broker has written count as heard at the first call.
        """
        if not self._has_looked:
            self._has_looked = True
            for name, _ in engine_files(self._layout):
                if is_of_other_host(name):
                    self._beats.setdefault(name, now)
        for name, at in list(self._beats.items()):
            if now - at > GONE_S:
                logger.warning("engine of another host silent name=%s silent_s=%.0f", name, now - at)
                self._remove(name)
        self.relays.sweep(now)

    def _run(self, request: GetRun, now: float, sender: str) -> RunReply:
        if self._reply is None or now - self._reply[1] >= KEPT_S:
            self._reply = self._looked(), now
        reply = self._reply[0]
        if request.have != self._digest:
            reply = msgspec.structs.replace(reply, config=self._shared)
        if request.have_tokens is None or self._keys is None:
            return reply
        if self._keys.look(now):
            self._hashes.clear()
        if sender not in self._hashes:
            tokens = self._tokens(sender, self._keys.value)
            digest = hashlib.blake2b(msgspec.msgpack.encode(tokens), digest_size=16).hexdigest()
            self._hashes[sender] = tokens, digest if tokens else ""
        tokens, digest = self._hashes[sender]
        told = () if request.have_tokens == digest else tokens
        return msgspec.structs.replace(reply, tokens_digest=digest, tokens=told)

    def _tokens(self, sender: str, keys: tuple[Listed, ...]) -> tuple[HttpToken, ...]:
        """Return the hashes for the servers of a key; none for a key without servers."""
        mine = next((key for key in keys if key.name == sender), None)
        if mine is None or mine.role not in _SERVING or mine.revoked is not None:
            return ()
        listed = (
            HttpToken(name=key.name, role=key.role, token=key.token, revoked=key.revoked) for key in keys
        )
        own = engine_token(self._own_token, sender)
        local = HttpToken(name=OWN, role=Role.WORKER, token=hash_of_token(own)) if own else None
        return (*listed, local) if local is not None else tuple(listed)

    def _looked(self) -> RunReply:
        engines = (self._state(one) for one in engines_of(self._layout)[:ENGINES_LIMIT])
        return RunReply(
            epoch=self._epoch,
            run=self._config.run.name,
            digest=self._digest,
            engines=tuple(one for one in engines if one is not None),
            teacher=self._teacher(),
            files=tuple(self._files()),
            run_id=self._run_id,
            over=self._is_over(),
        )

    def _is_over(self) -> bool:
        """Return whether the launcher says that the run needs no engine any more."""
        try:
            found = read_json(self._layout.ending, EndNotice)
        except (msgspec.DecodeError, OSError):
            return False
        return found is not None and found.over

    def _state(self, found: InferenceAddress) -> EngineState | None:
        if len(found.url) > URL_CHARS:
            return None
        own = self._config.inference
        is_own = engine_number(found.name) >= 0
        return EngineState(
            name=found.name,
            url=_told(found.url, own.host, own.advertise) if is_own else found.url,
            pid=found.pid,
            number=found.number,
            at=found.at,
            in_hand=found.in_hand,
            busy=found.busy,
            draining=found.draining,
            trouble=found.trouble[:200],
            network=found.network[:NETWORK_CHARS],
            version=found.version,
        )

    def _teacher(self) -> str:
        try:
            found = read_json(self._layout.teacher, InferenceAddress)
        except msgspec.DecodeError:
            return ""
        if found is None or len(found.url) > URL_CHARS:
            return ""
        return _told(found.url, self._config.teacher.host, self._config.inference.advertise)

    def _files(self) -> list[SharedFile]:
        return [
            SharedFile(name=name, nbytes=found[0], mark=found[1])
            for name in sorted(SHARED_FILES)
            if (path := self._path(name)) is not None and (found := _size_and_mark(path)) is not None
        ]

    def _path(self, name: str) -> Path | None:
        """Return where a file of the model is; None if the run has none."""
        if name not in SHARED_FILES:
            return None
        model = self._config.model
        if not self._config.trainer.enabled and not model.path:
            return None
        folders = student_directory(self._config, self._layout), student_model(self._config, self._layout)
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def _part(self, request: GetFile) -> FilePart | ErrorReply:
        path = self._path(request.name)
        if path is None:
            return refuse(ErrorCode.UNKNOWN, f"name: the run shares no such file (got {request.name!r})")
        try:
            with open_regular(path) as file:
                if _mark_of(os.fstat(file.fileno())) != request.mark:
                    return refuse(
                        ErrorCode.UNKNOWN, f"mark: {request.name} has changed; ask for the run again"
                    )
                file.seek(request.offset)
                data = file.read(PART_BYTES)
        except OSError as error:
            return refuse(ErrorCode.UNKNOWN, f"name: {request.name} cannot be read ({error.strerror})")
        return FilePart(offset=request.offset, data=data, checksum=google_crc32c.value(data))

    def _beat(self, beat: EngineBeat, now: float, sender: str) -> Ok | ErrorReply:
        engine = beat.engine
        if not is_of_other_host(engine.name):
            return refuse(ErrorCode.INVALID, f"name: must be inference.NAME (got {engine.name!r})")
        if _URL.fullmatch(engine.url) is None:
            return refuse(ErrorCode.INVALID, f"url: must be http://HOST:PORT (got {engine.url!r})")
        if sender and self._owners.get(engine.name, sender) != sender:
            return refuse(
                ErrorCode.FORBIDDEN,
                f"name: belongs to another key (got {engine.name} with key {sender}); wait {GONE_S:.0f} "
                "seconds if this key replaces that one, else use another name",
            )
        if (gone := other_run(self.name, self._run_id, engine.run_id)) is not None:
            return gone
        other, network = self._hosts.get(engine.name, (beat.host, engine.network))
        # Copies of one machine have equal names of their host, but each has a network of its own.
        is_other = other != beat.host or network != engine.network
        if is_other and now - self._beats.get(engine.name, -math.inf) <= TAKEN_S:
            return refuse(
                ErrorCode.FORBIDDEN,
                f"name: an engine of {'host' if other != beat.host else 'another host called'} {other} has it (got "
                f"{engine.name} of host {beat.host}); give each engine a --name of its own",
            )
        if beat.ends:
            self._remove(engine.name)
            return Ok()
        if engine.name not in self._beats and len(self._beats) >= ENGINES_LIMIT:
            return refuse(
                ErrorCode.LIMIT, f"name: {ENGINES_LIMIT} engines of other hosts are known, the limit"
            )
        if engine.name not in self._beats:
            logger.info("engine of another host name=%s url=%s host=%s", engine.name, engine.url, beat.host)
        self._beats[engine.name] = now
        self._hosts[engine.name] = beat.host, engine.network
        if (
            self._versions.get(engine.name, (None, 0.0))[0] != engine.version
            or engine.name not in self._versions
        ):
            self._versions[engine.name] = engine.version, now
        if sender:
            self._owners[engine.name] = sender
        try:
            write_json(
                self._layout.engine(engine.name),
                InferenceAddress(
                    url=engine.url,
                    pid=engine.pid,
                    name=engine.name,
                    number=engine.number,
                    at=engine.at,
                    in_hand=engine.in_hand,
                    busy=min(max(engine.busy, 0.0), 1.0),
                    draining=engine.draining,
                    trouble=engine.trouble,
                    network=engine.network,
                    key=sender,
                    run_id=engine.run_id,
                    version=engine.version,
                ),
            )
        except OSError as error:
            return refuse(ErrorCode.UNKNOWN, f"the address cannot be written ({error.strerror})")
        return Ok()

    def _ticket(self, sender: str) -> WeightsTicket | ErrorReply:
        backend = self._config.weights.backend
        if backend != "stream":
            return refuse(
                ErrorCode.UNKNOWN, f"weights.backend: must be stream for other hosts (got {backend})"
            )
        try:
            found = read_json(self._layout.stream, StreamAddress)
            if found is None:
                return refuse(ErrorCode.UNKNOWN, "weights: the relay of the run does not serve them yet")
            made = ticket.issue(found.secret, sender or "without a key")
        except (msgspec.DecodeError, OSError, ValueError) as error:
            return refuse(ErrorCode.UNKNOWN, f"weights: the address of the relay cannot be read ({error})")
        return WeightsTicket(port=found.port, shown=made.shown, key=made.key, sealed=found.sealed)

    def _remove(self, name: str) -> None:
        self._beats.pop(name, None)
        self._owners.pop(name, None)
        self._hosts.pop(name, None)
        self._versions.pop(name, None)
        self._layout.engine(name).unlink(missing_ok=True)


def _told(url: str, bound: str, advertise: str) -> str:
    """Return the URL of a server of this host for other hosts.

    Args:
        url: For this host.
        bound: Host that the server binds.
        advertise: Host that others are told instead; empty for none.
    """
    host = f"[{advertise}]" if ":" in advertise else advertise or _ANY.get(bound, "")
    if not host:
        return url
    scheme, _, rest = url.partition("://")
    port = re.search(r":([0-9]+)(/|$)", rest)
    return f"{scheme}://{host}:{port[1]}" if port else f"{scheme}://{host}"


def _size_and_mark(path: Path) -> tuple[int, str] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_size, _mark_of(found)) if found.st_size <= FILE_LIMIT_BYTES else None


def _mark_of(found: os.stat_result) -> str:
    return f"{found.st_size}.{found.st_mtime_ns}.{found.st_ino}"
