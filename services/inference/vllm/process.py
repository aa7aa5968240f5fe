"""One vLLM: started in its own environment, watched, and ended with all that it started.

It leads its own session, like every process of a run (`services.orchestrator.processes`), and writes to a log of its
own. It carries the marker of the engine that started it, so that whoever sweeps after that engine finds it; and the
kernel ends it when that engine is killed (`start`).
"""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import rolloutmq
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import ResourceError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.services.inference.vllm import command, place
from rolloutmq.services.inference.vllm.installed import require_vllm
from rolloutmq.services.orchestrator.identity import inherited_token
from rolloutmq.services.orchestrator.processes import Exit, Process, spawn

logger = logging.getLogger(__name__)

KILL_WAIT_S: Final = 5.0
"""Time that the kernel gets to end what was killed."""
LAST_LINES: Final = 5


class VllmEndedError(ResourceError):
    """vLLM ended by itself, or did not come up in time."""

    def __init__(self, how: str, log: Path, last: str) -> None:
        self.how = how
        self.log = log
        self.last = last
        """End of its log."""

    def __str__(self) -> str:
        return f"vLLM {self.how}; its log is {self.log}: {self.last}"


class Vllm:
    """A vLLM that lives. Made by `running`."""

    def __init__(self, process: Process, socket: Path, log: Path) -> None:
        self.socket = socket
        self._process = process
        self._log = log
        self._over = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of its API server, which leads its group."""
        return self._process.identity.pid

    async def ended(self) -> None:
        """Wait until it ends by itself, which is never in order.

        Raises:
            VllmEndedError: It did.
        """
        await self._over.wait()
        raise self.failure("ended by itself")

    def failure(self, how: str) -> VllmEndedError:
        """Return the error that says what became of it."""
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return VllmEndedError(how, self._log, " | ".join(line.strip()[-300:] for line in lines))

    async def stop(self, grace_s: float) -> Exit | None:
        """End it: SIGTERM, SIGKILL to its group after `grace_s`. Returns how it ended."""
        self._process.send(signal.SIGTERM)
        for seconds in (grace_s, KILL_WAIT_S):
            try:
                async with asyncio.timeout(seconds):
                    await self._over.wait()
            except TimeoutError:
                self._process.send_group(signal.SIGKILL)
            else:
                break
        found = self._process.poll()
        logger.info("vllm ended pid=%d how=%s", self.pid, found)
        return found

    def note_end(self) -> None:
        """Called by the loop once the process has ended."""
        self._over.set()


@asynccontextmanager
async def running(config: RunConfig, layout: RunLayout, name: str, seed: int) -> AsyncIterator[Vllm]:
    """Keep a vLLM for as long as the block lasts. For the main thread, with which it would end.

    Args:
        config: The run.
        layout: Its directory, with the model's configuration and tokenizer in it.
        name: Of the engine.
        seed: Of what it draws.

    Raises:
        ConfigError: There is no such environment.
        AddressInUseError: Another living engine has that name.
    """
    require_vllm(config.inference.vllm.python)
    with place.held(layout, name) as directory:
        async with _running(config, layout, name, seed, directory) as vllm:
            yield vllm


@asynccontextmanager
async def _running(
    config: RunConfig, layout: RunLayout, name: str, seed: int, directory: Path
) -> AsyncIterator[Vllm]:
    socket, path = directory / place.SOCKET, directory / "path"
    socket.unlink(missing_ok=True)
    _link(path)
    spec = ProcessSpec(
        name=name,
        role=Role.INFERENCE,
        argv=command.arguments(config.inference, layout.model, socket, os.getpid(), seed),
        env=dict(command.variables(config.inference, path)),
        log=str(layout.log(f"{name}-vllm")),
    )
    process = spawn(spec, inherited_token() or secrets.token_hex(8))
    vllm = Vllm(process, socket, Path(spec.log))
    logger.info("vllm started pid=%d log=%s", vllm.pid, spec.log)
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(process.fileno(), vllm.note_end)
        yield vllm
    finally:
        await asyncio.shield(vllm.stop(config.inference.vllm.grace_s))
        loop.remove_reader(process.fileno())
        process.close()


def _link(path: Path) -> None:
    """Make a directory in which there is this package alone: what else is installed beside it is not vLLM's."""
    path.mkdir(exist_ok=True)
    link, package = path / "rolloutmq", Path(rolloutmq.__file__).parent
    link.unlink(missing_ok=True)
    link.symlink_to(package)
