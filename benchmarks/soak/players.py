"""The processes of an act beside the broker's parent: a broker, a producer, or one rank of a trainer.

    python -m benchmarks.soak.players ROLE SPEC

Every player dies with the soak. `SIGUSR1` asks a producer to leave at once and a rank to give its next batch back;
`SIGUSR2` asks a producer to send everything first. The soak ignores both, so a player that is still starting does too,
and the soak sends them again.
"""

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from benchmarks.soak.plan import ProducerPlan, TrainerPlan

PR_SET_PDEATHSIG: Final = 1
IMPATIENCE: Final = (
    ("rolloutmq.bus.consumer.connection", "BEAT_S", 0.25),
    ("rolloutmq.bus.consumer.connection", "PATIENCE_S", 0.7),
    ("rolloutmq.bus.consumer.connection", "REPEAT_S", 0.2),
    ("rolloutmq.bus.producer.connection", "PATIENCE_S", 0.7),
    ("rolloutmq.bus.producer.connection", "REPEAT_S", 0.2),
    ("rolloutmq.bus.transport.discovery", "ATTEMPT_S", 0.4),
)
"""Settings with which a client soon notices that its broker is gone."""


class Spec(msgspec.Struct, frozen=True):
    """What every player is told."""

    run_dir: Path
    address: str
    """Address of the broker, in place of the run directory; empty for none."""
    books: Path
    life: int

    @property
    def where(self) -> Path | str:
        """Where the client looks for the broker."""
        return self.address or self.run_dir


class ProducerSpec(Spec, frozen=True):
    """What a producer is told; it makes no shared memory above `file_bytes` if that is not 0."""

    plan: ProducerPlan
    file_bytes: int = 0


class RankSpec(Spec, frozen=True):
    """What a rank is told.

    Attributes:
        cell: Its cell of the board.
        resume: Step of the checkpoint all ranks go back to, of the incarnation before; None to go on.
        lone: It drains the queue alone, group by group.
    """

    plan: TrainerPlan
    rank: int
    cell: int
    board: Path
    checkpoint: Path
    incarnation: int
    resume: tuple[int, int] | None = None
    lone: bool = False


def encode(spec: Spec) -> str:
    """Return a spec as an argument of a command line."""
    return msgspec.json.encode(spec, enc_hook=str).decode()


def _decode(text: str, kind: type[Any]) -> Any:
    return msgspec.json.decode(text, type=kind, dec_hook=lambda wanted, value: wanted(value))


def on_signal(number: signal.Signals, act: Callable[[], object]) -> None:
    """Call a function of the running loop when a signal arrives; behind the loop's end a signal does nothing.

    A handler of the loop would end with it, and a late signal would then kill the process.
    """
    loop = asyncio.get_running_loop()

    def handle(_number: int, _frame: object) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(act)

    signal.signal(number, handle)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _broker(text: str) -> int:
    from rolloutmq.services.broker.server import main

    return main(_decode(text, Spec).run_dir)


def _producer(text: str) -> int:
    from benchmarks.soak.producing import produce

    spec = _decode(text, ProducerSpec)
    if spec.file_bytes:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec.file_bytes, most))
    uvloop.run(produce(spec))
    return 0


def _rank(text: str) -> int:
    from benchmarks.soak.mixing import mix
    from benchmarks.soak.training import train

    spec = _decode(text, RankSpec)
    uvloop.run(mix(spec) if spec.plan.window else train(spec))
    return 0


ROLES: Final[dict[str, Callable[[str], int]]] = {"broker": _broker, "producer": _producer, "rank": _rank}


def _become_impatient() -> None:
    from importlib import import_module

    for module, name, value in IMPATIENCE:
        setattr(import_module(module), name, value)


def main(role: str, parent: str, spec: str) -> int:
    """Play a role until it ends; return the exit code."""
    _die_with(int(parent))
    if role != "broker":
        _become_impatient()
    code = ROLES[role](spec)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the interpreter's end would restore the default: to die
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
