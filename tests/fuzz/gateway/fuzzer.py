"""The fuzzer of the gateway: hostile bytes against its protocol and its application, with a real broker behind it.

The connections are in memory (`http_line`); from the protocol class on everything is as in the gateway's process.

- Every reply has a status below 500, or the connection ends. A 503 that says when to come again is a reply, too.
- No exception reaches the event loop, and none the log.
- There are no more replies than requests that began, and they are nothing but replies.
- Afterwards no memory is counted for a request, no task is left, and honest clients are answered as before.
"""

import asyncio
import json
import logging
import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import uvicorn
from tests.fuzz.campaign import Fuzzer
from tests.fuzz.gateway.http_inputs import Burst, burst
from tests.fuzz.gateway.http_line import Line, Reply, Watched, replies
from tests.services.gateway.site import ENVIRONMENT, TRAINER, configured, scored
from uvicorn.server import ServerState

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.gateway.app import GatewayApp
from rolloutmq.services.gateway.server import access
from rolloutmq.services.gateway.service import Gateway

ANSWER_S: Final = 20.0
"""Longest wait for the end of all replies."""
TURNS: Final = 3
"""Turns of the loop in which a quiet connection stays quiet."""
ROUNDS: Final = 25
"""Bursts between two whole rounds of honest clients."""
CONFIG: Final = GatewayConfig(
    enabled=True,
    port=0,
    max_body_bytes=1 << 20,
    max_inflated_bytes=8 << 20,
    max_in_hand_bytes=32 << 20,
    silent_s=ANSWER_S * 2,
    post_wait_s=2.0,
    cors_origins=("http://page.example",),
)


class _Errors(logging.Handler):
    """Keeps what is logged as an error: a defect is, also one that a client does not see."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.records.append(f"{record.getMessage().strip()}: {error!r}" if error else record.getMessage())


class GatewayFuzzer(Fuzzer):
    """Sends bursts to one gateway, which lives as long as the fuzzer."""

    name = "gateway"

    def __init__(self) -> None:
        self._burst = Burst(())
        self._count = 0
        self._errors = _Errors()
        self._failures: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            root.mkdir(mode=0o700)
            config, self._layout = configured(durability="os", segment_bytes=1 << 22), RunLayout(root)
            write_json(self._layout.config, config)
            self._watch_logs(stack)
            stack.enter_context(running_broker(config, self._layout))
            self._runner = stack.enter_context(asyncio.Runner())
            self._runner.get_loop().set_exception_handler(self._note)
            self._runner.run(self._begin(config))
            stack.callback(lambda: self._runner.run(self._end()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _watch_logs(self, stack: ExitStack) -> None:
        """Read the errors of gateway and server in the log, also where logging is off."""
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, before)
        for name in ("rolloutmq.services.gateway", "uvicorn.error"):
            logger = logging.getLogger(name)
            logger.addHandler(self._errors)
            stack.callback(logger.removeHandler, self._errors)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failures.append(f"{context['message']}: {context.get('exception')!r}")

    async def _begin(self, config: Any) -> None:
        ready, self._over = asyncio.Event(), asyncio.Event()
        self._life = asyncio.create_task(self._live(config, ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._life, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._life.done():
            self._life.result()

    async def _live(self, config: Any, ready: asyncio.Event) -> None:
        async with Gateway.opened(self._layout, CONFIG) as gateway:
            self._app = GatewayApp(gateway, CONFIG, access(config, CONFIG), config.broker.max_group_bytes)
            self._server = uvicorn.Config(
                self._app, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
            )
            self._server.load()
            self._state = ServerState()
            ready.set()
            await self._over.wait()
            self._app.close()

    async def _end(self) -> None:
        self._over.set()
        await self._life

    def attempt(self, rng: random.Random) -> str:
        """Send one burst, and then be an honest client."""
        self._burst, self._count = burst(rng), self._count + 1
        return self._runner.run(self._one(honest=self._count % ROUNDS == 0))

    def keep(self, directory: Path) -> str:
        """Keep the bytes."""
        (directory / "burst.bin").write_bytes(self._burst.data)
        return f"burst.bin in {len(self._burst.pieces)} pieces, {self._burst.data[:2000]!r}"

    async def _one(self, *, honest: bool) -> str:
        async with asyncio.timeout(ANSWER_S):
            got, begun = await self._said(self._burst.pieces)
        assert len(got) <= begun, f"{len(got)} replies to {begun} requests"
        for reply in got:
            patient = reply.status == 503 and b"retry-after" in reply.headers
            told = f"{reply.status} {reply.body[:500]!r} {self._errors.records}"
            assert reply.status < 500 or patient, told
        self._require_quiet()
        await self._still_answers()
        if honest:
            await self._whole_round()
        self._require_quiet()
        statuses = Counter(reply.status for reply in got)
        return str(max(statuses, key=lambda status: (statuses[status], status))) if got else "closed"

    def _require_quiet(self) -> None:
        """Fail if something went wrong that no client saw, or if something is left of a request."""
        assert not self._failures, self._failures
        assert not self._errors.records, self._errors.records
        assert not self._state.connections
        assert not self._state.tasks
        assert self._app._in_hand.nbytes == 0, "bytes of a request are counted that has ended"

    async def _said(self, pieces: tuple[bytes, ...]) -> tuple[list[Reply], int]:
        """Send pieces over a new connection; return the replies, and how many requests began."""
        loop = asyncio.get_running_loop()
        protocol = Watched(
            config=self._server, server_state=self._state, app_state={}, _loop=loop, head_s=CONFIG.silent_s
        )
        line = Line(loop, protocol)
        protocol.connection_made(line)
        for piece in pieces:
            while not (line.reading or line.is_closing()):  # noqa: ASYNC110 - the server knows no event for it
                await asyncio.sleep(0)
            if line.is_closing():
                break
            protocol.data_received(piece)
            await asyncio.sleep(0)
        quiet = 0
        while not line.is_closing() and quiet < TURNS:
            quiet = quiet + 1 if protocol.waits else 0
            await asyncio.sleep(0)
        line.leave()
        await line.lost.wait()
        if self._state.tasks:  # they end by themselves, or notice that their client is gone
            await asyncio.wait(self._state.tasks)
            await asyncio.sleep(0)
        return replies(bytes(line.out), protocol.methods), len(protocol.methods)

    async def _asked(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """Make an honest request, and return the reply."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        async with asyncio.timeout(ANSWER_S):
            got, begun = await self._said((head + data,))
        assert begun == 1
        assert [reply.status for reply in got] == [status], (method, path, got)
        (reply,) = got
        assert reply.whole
        return json.loads(reply.body) if reply.body.startswith((b"{", b"[")) else reply.body

    async def _still_answers(self) -> None:
        """Be an honest client for a moment."""
        info = await self._asked("GET", "/info")
        assert info.keys() == {"batch_size", "max_token_len"}, info
        received = await self._asked("POST", "/scored_data", scored(self._count))
        assert received["status"] == "received", received

    async def _whole_round(self) -> None:
        """Start over, and bring a group from an environment to a trainer."""
        ask = partial(self._asked)
        await ask("POST", "/reset_data")
        await ask("POST", "/register", {**TRAINER, "batch_size": 2})
        assert (await ask("GET", "/batch"))["batch"] is None
        env_id = (await ask("POST", "/register-env", ENVIRONMENT))["env_id"]
        await ask("POST", "/scored_data", scored(self._count, env_id=env_id))
        assert (await ask("GET", "/status"))["queue_size"] == 1
        batch: Any = None
        while batch is None:
            batch = (await ask("GET", "/batch"))["batch"]
        assert [group["tokens"][0][0] for group in batch] == [self._count]
        await ask("POST", "/reset_data")
