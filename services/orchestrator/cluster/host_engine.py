"""What an inference engine of a run has beside it on a host of a cluster.

    relay        receives the weights from the run, and shares them with the engine in the memory of the host
    heartbeats   tell the broker where the engine is, so that the workers of every host find it

An engine without its relay would sample from older and older weights. So it ends with the relay, as a crash, and its
next life has both anew.
"""

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from rolloutmq.bus.transport.mirror.engine_beats import EngineBeats, own_host
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.bus.transport.mirror.place import host_of
from rolloutmq.bus.transport.mirror.run_copy import remove_weights
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role, python_command
from rolloutmq.services.process.child import Exit, Process, spawn

KILLED_S: Final = 0.02
"""Interval of looks for the end of a killed relay."""


def served_here(config: RunConfig, address: str) -> RunConfig:
    """Return the configuration of an engine that listens where other hosts reach this one.

    It asks for the tokens of the run's keys. The run's certificate names the run's host, so it has none.

    Args:
        config: As the run tells it.
        address: Address of the broker for this host.
    """
    update = {"host": own_host(host_of(address)), "port": 0, "advertise": "", "insecure": True}
    return config.model_copy(update={"inference": config.inference.model_copy(update=update)})


class EngineSide:
    """The relay and the heartbeats of one engine. For one event loop.

    Args:
        name: Name of the engine.
        mirror: Keeps its directory.
    """

    def __init__(self, name: str, mirror: Mirror) -> None:
        self._name = name
        self._mirror = mirror
        self._beating: asyncio.Task[None] | None = None
        self._relay: Process | None = None
        self.ended: Exit | None = None
        """How the relay ended by itself; None if it did not."""

    def start(self, engine: ProcessSpec, marked: str, output: int) -> None:
        """Start the relay, with marker, variables and output of its engine, and the heartbeats.

        Raises:
            OSError: It cannot be started.
        """
        module, run_dir = "rolloutmq.launch.service_process", str(self._mirror.layout.root)
        argv = python_command(sys.executable, module, "relay", "--run-dir", run_dir)
        log = str(self._mirror.layout.log("relay"))
        self._relay = spawn(replace(engine, role=Role.RELAY, argv=argv, log=log), marked, output)
        beats = EngineBeats(self._name, lambda own, _: own)
        self._beating = asyncio.create_task(beats.run(self._mirror, self._mirror.layout), name="heartbeats")

    def has_ended(self) -> bool:
        """Return whether the relay has ended by itself."""
        if self._relay is not None and self.ended is None:
            self.ended = self._relay.poll()
        return self.ended is not None

    async def close(self) -> None:
        """End the relay, and tell the broker that the engine has ended; a few seconds at most. May be repeated."""
        relay, beating = self._relay, self._beating
        self._relay = self._beating = None
        if relay is not None:
            relay.send_group(signal.SIGKILL)  # it keeps nothing: the weights go with the engine
            while self.ended is None and relay.poll() is None:  # noqa: ASYNC110 - the kernel kills it at once
                await asyncio.sleep(KILLED_S)
            relay.close()
        if beating is not None:
            beating.cancel()
            await asyncio.wait({beating})


def remove_directory(directory: Path) -> None:
    """Remove the directory of an engine's life, and its weights in shared memory; its processes have ended."""
    remove_weights(RunLayout(directory / "run"))
    shutil.rmtree(directory, ignore_errors=True)
