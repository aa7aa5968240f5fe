"""The mirror: keeps the directory of a run of another host fresh, for as long as programs of this host use it.

    ask       once a second, over the first of the addresses that answers
    write     configuration, addresses of broker, engines and teacher, files of the model; only what has changed
    wait      while the broker is away the files stay as they are: a lasting wait is logged, nothing gives up

Programs of this host read the directory as they read a run directory. Only the mirror asks for it, so a thousand
workers of a host cost the broker one request a second. Clocks of the two hosts are not compared.
"""

import asyncio
import logging
import random
import time
from pathlib import Path
from typing import Final

import google_crc32c

from rolloutmq.bus.log_throttle import LogThrottle, WaitLog
from rolloutmq.bus.transport.endpoint import info_of
from rolloutmq.bus.transport.keys.bundle import CurveKeys, load_bundle, load_keys
from rolloutmq.bus.transport.keys.handshakes import FIRST_S, LONGEST_S
from rolloutmq.bus.transport.mirror.place import directory_of, host_of
from rolloutmq.bus.transport.mirror.run_copy import Accept, RunCopy
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ConfigError,
    KeyRefusedError,
    MalformedError,
    RefusedError,
    WireError,
)
from rolloutmq.schemas.files import Connection, Endpoints, RunLayout
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.joining import PART_BYTES, FilePart, GetFile, GetRun, RunReply, SharedFile
from rolloutmq.schemas.wire.requests import GetInfo

logger = logging.getLogger(__name__)

ASK_S: Final = 1.0
"""Time between two looks at the run, as engines tell of themselves."""
ANSWER_S: Final = 3.0
"""Silence of an address after which the next one is tried."""
RESOLVE_S: Final = 2.0
"""Time limit of a look at the name of a silent address."""
OTHER_VERSION: Final = (
    "the run may have another version of RolloutMQ than this host: install the same on both"
)


class Mirror:
    """One run of another host. For one event loop.

    Args:
        connection: How this host reaches it.
        accept: Checks its configuration.
        given: Directory of this host; None for the usual one.
        apart: Added to the name of the usual directory, for programs that share theirs with no others.
        asks: Its programs ask the HTTP servers of the run, with the token of the key.
        serves: Its programs have an HTTP server, which with a key asks for tokens.
        name: Name of the command, for its own configuration in a directory that it may share.
        pauses: Once the address serves a fresh run, write nothing until `follow`: programs of the old one end first.

    Attributes:
        copy: The directory; None before the first answer.
        changes: Number of configurations so far.
        refused: Why the newest configuration was not accepted; None if it was.
        problem: What the mirror waits for; empty while the broker answers.
        run_id: Id of the run in the directory; empty before the first answer.
        replaced: The address serves a fresh run of the same name, and `follow` was not called yet.
        over: The run ends, and needs no engine or relay any more.
        refusal: Why a broker last refused the key; None if it let it in since.
    """

    def __init__(
        self,
        connection: Connection,
        accept: Accept,
        given: Path | None = None,
        *,
        apart: str = "",
        asks: bool = False,
        serves: bool = False,
        name: str = "",
        pauses: bool = False,
    ) -> None:
        self.copy: RunCopy | None = None
        self._name = name
        self._config: RunConfig | None = None
        self.changes = 0
        self.refused: ConfigError | None = None
        self.problem = "the run was not asked yet"
        self.refusal: KeyRefusedError | None = None
        self.run_name = self.run_id = ""
        self.replaced = self.over = False
        self._pauses = pauses
        self._connection = connection
        self._accept = accept
        self._given = given
        self._apart = apart
        self._asks = asks
        self._serves = serves
        self._digest = ""
        self._tokens: str | None = None
        """Digest of the written tokens."""
        self._place: tuple[str, int] | None = None
        """Address and epoch of the written endpoints."""
        self._next = 0
        self._log = WaitLog()
        self._unwritten = LogThrottle()
        self._news = asyncio.Event()

    @property
    def layout(self) -> RunLayout:
        """The directory, after `ready`."""
        assert self.copy is not None, "the run has not answered yet"
        return self.copy.layout

    @property
    def config(self) -> RunConfig:
        """The configuration of this host, after `ready`."""
        assert self._config is not None, "no configuration was accepted yet"
        return self._config

    async def ready(self) -> None:
        """Wait without a limit until the directory has a configuration; `run` must run beside.

        Raises:
            ConfigError: The configuration is not accepted.
        """
        while not self.changes:
            if self.refused is not None:
                raise self.refused
            await self.changed()

    async def changed(self) -> None:
        """Wait for another configuration, accepted or refused."""
        self._news.clear()
        await self._news.wait()

    def follow(self) -> None:
        """Turn to the fresh run that serves the address by now: its configuration comes as the next one."""
        self.replaced = False
        self.run_id = self._digest = ""
        self._place = None

    async def run(self) -> None:
        """Keep the directory fresh until cancelled.

        Raises:
            OSError: The directory cannot be written at the start.
            MissingError, NotPrivateError, ConfigError, UnusablePathError: The key cannot be used; also ConfigError: the
                broker has another version.
            RefusedError: The broker refuses the key.
        """
        pause_s = FIRST_S
        while True:
            address = self._connection.addresses[self._next % len(self._connection.addresses)]
            async with BrokerClient(address, keys=self.keys()) as client:
                try:
                    while True:
                        await self._look(client)
                        self._answered()
                        pause_s = FIRST_S
                        await asyncio.sleep(ASK_S)
                except (
                    KeyRefusedError
                ) as error:  # it may be let in later: its key is replaced, or known by then
                    self.refusal = error
                    self._misses(error.problem)
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # each try costs a handshake
                    pause_s = min(2 * pause_s, LONGEST_S)
                except BrokerUnavailableError:
                    self._misses(await _silence_of(address))
                except WireError as error:
                    self._misses(f"{address}: {error}; {OTHER_VERSION}")
                    await asyncio.sleep(ASK_S)
                except RefusedError as error:
                    if error.code is not ErrorCode.UNKNOWN:
                        raise _told_of(error, address) from None
                    self._misses(f"{address}: {error}")
                    await asyncio.sleep(ASK_S)
            self._next += 1

    async def _look(self, client: BrokerClient) -> None:
        asked = GetRun(have=self._digest, have_tokens=(self._tokens or "") if self._serves else None)
        reply = await client.request(asked, ANSWER_S)
        if not isinstance(reply, RunReply):
            raise MalformedError(f"wrong type of reply to GetRun (got {type(reply).__name__})")
        if self.run_name and reply.run != self.run_name:
            self.refused = ConfigError("run.name", f"the run is another one by now (got {reply.run})")
            self._news.set()
            return
        if self.run_id and reply.run_id != self.run_id:
            if self._pauses:
                self.replaced = True
                self._news.set()
            else:
                self.follow()  # the next look asks for all of it
            return
        if reply.over and not self.over:
            self._news.set()
        self.over = reply.over
        copy = self._copy(reply.run, client.address)
        self.run_name = reply.run
        try:
            if reply.run_id and not self.run_id:
                copy.begin(reply.run_id)
                self.run_id = reply.run_id
            await self._take(client, copy, reply)
        except OSError as error:
            if not self.changes:  # nothing runs here yet, and the user sees the error
                raise
            # A full disk: what is there stays, and the next look tries again.
            if self._unwritten.is_due(str(error), time.monotonic()):
                logger.warning("directory of the run not written error=%s", error)

    async def _take(self, client: BrokerClient, copy: RunCopy, reply: RunReply) -> None:
        """Bring the directory up to a reply."""
        if self._place != (client.address, reply.epoch):
            await self._find_sockets(client, copy)
            self._place = client.address, reply.epoch
        if self._serves:
            self._take_tokens(copy, reply)
        copy.take_servers(reply, client.address, time.monotonic())
        for file in copy.missing(reply.files):
            copy.take_file(file, await _fetched(client, file))
        if reply.digest != self._digest:
            self._take_config(copy, reply)

    def _copy(self, run: str, address: str) -> RunCopy:
        if self.copy is None:
            # By the first address: another one of the same broker is the same run.
            directory = directory_of(run, self._connection.addresses[0], self._given, self._apart)
            self.copy = RunCopy(RunLayout(directory), self._connection, self._name)
            logger.info("run of another host run=%s address=%s directory=%s", run, address, directory)
        return self.copy

    async def _find_sockets(self, client: BrokerClient, copy: RunCopy) -> None:
        info = info_of(client.address, await client.request(GetInfo(), ANSWER_S))
        copy.take_endpoints(
            Endpoints(
                ingest=info.ingest,
                serve=client.address,
                events=info.events,
                publish=info.publish,
                pid=0,
                epoch=info.epoch,
                key=self._connection.key,
                run_id=info.run_id,
            )
        )

    def _take_tokens(self, copy: RunCopy, reply: RunReply) -> None:
        """Keep the tokens that servers of this host accept: before the configuration, with which they start.

        A broker that tells none leaves a server with a key closed to everybody.
        """
        if reply.tokens_digest != self._tokens:
            copy.take_tokens(reply.tokens if self._connection.key else None)
            self._tokens = reply.tokens_digest

    def _take_config(self, copy: RunCopy, reply: RunReply) -> None:
        try:
            config = self._accept(reply.config, copy.layout)
        except ConfigError as error:
            self.refused = error
        else:
            self._config = self._with_access(config, copy)
            copy.take_config(self._config)
            self.refused = None
            self.changes += 1
        self._digest = reply.digest
        self._news.set()

    def keys(self) -> CurveKeys | None:
        """Return the keys of this host's sockets, None without a key; raises what `load_bundle` raises."""
        return load_keys(Path(self._connection.key)) if self._connection.key else None

    def _with_access(self, config: RunConfig, copy: RunCopy) -> RunConfig:
        """Return the configuration with the files by which programs of this host reach the HTTP servers of the run."""
        bundle = load_bundle(Path(self._connection.key)) if self._connection.key else None
        update = {
            # Servers of this host are none of the run's: they must not ask for it.
            "http_token_file": copy.take_token(bundle.token if bundle is not None and self._asks else ""),
            "tls_ca": copy.take_ca(bundle.ca if bundle is not None else ""),
        }
        return config.model_copy(update={"run": config.run.model_copy(update=update)})

    def _answered(self) -> None:
        if self.problem:
            logger.info("run answers run=%s", self.run_name)
        self.problem = ""
        self.refusal = None
        self._log.over()

    def _misses(self, problem: str) -> None:
        self.problem = problem
        now = time.monotonic()
        if self._log.is_due("away", now):
            logger.warning("waiting for the run waited_s=%.0f: %s", self._log.waited_s(now), problem)


async def _silence_of(address: str) -> str:
    """Return why an address may not answer: its name is unknown, or nobody is there."""
    host = host_of(address).strip("[]")
    try:
        async with asyncio.timeout(RESOLVE_S):
            await asyncio.get_running_loop().getaddrinfo(host, None)
    except TimeoutError:
        return f"no answer from {address}: this host cannot look up the name {host}; check its name service"
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"no answer from {address}: the name {host} is unknown here ({why}); correct it, or use an address"
    return f"no answer from {address}; check that the broker runs, and the address"


def _told_of(error: RefusedError, address: str) -> RefusedError | ConfigError:
    """Return the error of a refusal: a broker of another version finds the request malformed."""
    if error.code not in {ErrorCode.MALFORMED, ErrorCode.VERSION}:
        return error
    return ConfigError("--connect", f"{address} does not know this request ({error.detail}); {OTHER_VERSION}")


async def _fetched(client: BrokerClient, file: SharedFile) -> bytes:
    """Return a file of the model, part by part.

    Raises:
        MalformedError: A part is another one than was asked for, or damaged.
        RefusedError: The file has changed meanwhile.
    """
    data = bytearray()
    while len(data) < file.nbytes:
        asked = GetFile(name=file.name, mark=file.mark, offset=len(data))
        part = await client.request(asked, ANSWER_S)
        if not isinstance(part, FilePart) or part.offset != len(data) or not part.data:
            raise MalformedError(f"{file.name}: the reply is not the part from {len(data)}")
        if len(part.data) < min(PART_BYTES, file.nbytes - len(data)):  # a byte at a time would take for ever
            raise MalformedError(
                f"{file.name}: the part from {len(data)} has {len(part.data)} bytes, too few"
            )
        if google_crc32c.value(part.data) != part.checksum:
            raise MalformedError(f"{file.name}: the part from {len(data)} is damaged")
        data += part.data
        if len(data) > file.nbytes:
            raise MalformedError(f"{file.name}: has more than {file.nbytes} bytes")
    return bytes(data)
