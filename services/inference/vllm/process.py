"""Process of one vLLM: started in its own environment, watched, and ended with all its children.

It leads its own session, like every process of a run (`services.process.child`), and has its own log. It carries the
token of its engine, so that a sweep after that engine finds it. The kernel kills it if its engine is killed (`start`).
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
from rolloutmq.bus.files import PRIVATE_DIRECTORY
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ResourceError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.services.inference.vllm import command, socket_dir
from rolloutmq.services.inference.vllm.installed import require_vllm
from rolloutmq.services.process.child import Exit, Process, spawn
from rolloutmq.services.process.identity import inherited_token

logger = logging.getLogger(__name__)

KILL_WAIT_S: Final = 5.0
"""Seconds the kernel gets to end a killed process."""
LAST_LINES: Final = 5


class VllmEndedError(ResourceError):
    """vLLM exited unexpectedly, or did not start in time."""

    def __init__(self, how: str, log: Path, last: str) -> None:
        self.how = how
        self.log = log
        self.last = last
        """End of its log."""

    def __str__(self) -> str:
        return f"vLLM {self.how}; see {self.log}, which ends with: {self.last}"


class Vllm:
    """A live vLLM. Made by `running`."""

    def __init__(self, process: Process, socket: Path, log: Path) -> None:
        self.socket = socket
        self._process = process
        self._log = log
        self._over = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of its API server, the leader of its group."""
        return self._process.identity.pid

    async def ended(self) -> None:
        """Wait until vLLM exits, which is always an error here.

        Raises:
            VllmEndedError: It has exited.
        """
        await self._over.wait()
        raise self.failure("exited unexpectedly")

    def failure(self, how: str) -> VllmEndedError:
        """Return an error with the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return VllmEndedError(how, self._log, " | ".join(line.strip()[-300:] for line in lines))

    async def stop(self, grace_s: float) -> Exit | None:
        """Send SIGTERM, and SIGKILL to its group after `grace_s`. Return the exit status."""
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
        """Record the exit; called by the event loop."""
        self._over.set()


@asynccontextmanager
async def running(config: RunConfig, layout: RunLayout, name: str, seed: int) -> AsyncIterator[Vllm]:
    """Run a vLLM for the duration of the block. For the main thread: vLLM ends with the thread that started it.

    Args:
        config: The run.
        layout: Its directory, with the model's configuration and tokenizer in it.
        name: Name of the engine.
        seed: Seed of vLLM's sampling.

    Raises:
        ConfigError: The environment does not exist.
        AddressInUseError: Another live engine has that name.
    """
    require_vllm(config.inference.vllm.python)
    with socket_dir.held(layout, name) as directory:
        async with _running(config, layout, name, seed, directory) as vllm:
            yield vllm


@asynccontextmanager
async def _running(
    config: RunConfig, layout: RunLayout, name: str, seed: int, directory: Path
) -> AsyncIterator[Vllm]:
    socket, path = directory / socket_dir.SOCKET, directory / "path"
    socket.unlink(missing_ok=True)
    _link(path)
    spec = ProcessSpec(
        name=name,
        role=Role.INFERENCE,
        argv=command.arguments(
            config.inference,
            layout.model,
            socket,
            os.getpid(),
            seed,
            mapped=config.weights.backend != "vllm_http",
            fp32_head=config.trainer.fp32_head,
        ),
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
    """Make a directory with a link to this package only, so that vLLM sees no other package of this environment."""
    path.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    link, package = path / "rolloutmq", Path(rolloutmq.__file__).parent
    link.unlink(missing_ok=True)
    link.symlink_to(package)
