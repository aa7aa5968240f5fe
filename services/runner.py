"""The one way in which a service lives: logging, signals, loop, exit code, files of its run.

The law of signals, the same for every process of a run:

    SIGTERM, SIGINT   the first asks for an orderly end, the second ends at once with 130
    SIGUSR1           asks to drain; where there is nothing to drain, for an orderly end

A process is spawned with SIGUSR1 blocked, because one that is still importing would die of it. It
is unblocked here, once the handler stands, and a drain that came earlier arrives then. The last
line that a failed service writes is `error: ` and the reason: the end of its log tells why.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import msgspec
import uvloop
from pydantic import BaseModel, ValidationError

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import (
    ConfigError,
    EnvironmentFailedError,
    MissingError,
    RolloutMQError,
    WorkersFailedError,
)
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import PERMANENT_FAILURE

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

FORCED: Final = 130
"""Exit code after a second signal."""
FILE_POLL_S: Final = 0.05
"""How often a file of another process is looked for; it is one `open` that fails."""
_HOPELESS: Final = (ConfigError, EnvironmentFailedError, WorkersFailedError)
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """The request to end: made once, seen by every task. Belongs to one loop and its thread."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.reason: str | None = None
        """Why, in one word such as `SIGTERM`; None as long as nobody asked."""

    def request(self, reason: str) -> None:
        """Ask for the end. Only the first reason is kept."""
        if self.reason is None:
            self.reason = reason
            logger.info("stopping reason=%s", reason)
        self.event.set()

    async def wait(self) -> str:
        """Wait until the end is asked for and return the reason."""
        await self.event.wait()
        return self.reason or ""


@contextmanager
def signals(
    on_stop: Callable[[str], None],
    on_drain: Callable[[], None] | None = None,
    on_force: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Handle the signals of a service as long as the block lasts, then put the old handlers back.

    For the main thread only. The callbacks run in it between two bytecodes, wherever it is: they
    may set a flag, write to a pipe or use `call_soon_threadsafe`, and nothing else. SIGUSR1 is
    unblocked inside the block.

    Args:
        on_stop: Called with the name of the first SIGTERM or SIGINT; a second one ends the process.
        on_drain: Called at each SIGUSR1. Without it SIGUSR1 is a request to stop, but never the
            second one that forces.
        on_force: Called at the second, before the process ends: the last chance to kill children.
    """
    asked = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            try:
                if on_force is not None:
                    on_force()
            finally:
                os._exit(FORCED)
        asked = True
        on_stop(signal.Signals(number).name)

    def drain(_number: int, _frame: FrameType | None) -> None:
        if on_drain is None:
            on_stop("SIGUSR1")
        else:
            on_drain()

    before = {number: signal.getsignal(number) for number in _HANDLED}
    for number in _HANDLED:
        signal.signal(number, drain if number is signal.SIGUSR1 else stop)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def set_up_logging() -> None:
    """Log to standard error: time, level, logger, event. Does nothing where handlers stand already."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )


def run_service(
    name: str,
    main: Callable[[Stop], Awaitable[None]],
    *,
    on_drain: Callable[[], None] | None = None,
    on_force: Callable[[], None] | None = None,
) -> int:
    """Run an async service on uvloop until `main` returns. Blocks; for the main thread only.

    Args:
        name: Name of the service in its log.
        main: Gets the request to end, watches it, and returns when everything is put away.
        on_drain: Called in the loop at SIGUSR1; without it SIGUSR1 is a request to end.
        on_force: Called at a second SIGTERM or SIGINT, just before the process ends with 130.

    Returns:
        0 if `main` returned, 1 if it raised, PERMANENT_FAILURE if it raised what starting again
        cannot help; the error is logged.
    """
    set_up_logging()
    faulthandler.enable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(name, main, on_drain, on_force))
    except Exception as error:  # noqa: BLE001 - the task boundary of the process
        log_failure(name, error)
        return PERMANENT_FAILURE if any(isinstance(leaf, _HOPELESS) for leaf in _leaves(error)) else 1
    return 0


async def _serve(
    name: str,
    main: Callable[[Stop], Awaitable[None]],
    on_drain: Callable[[], None] | None,
    on_force: Callable[[], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    stop = Stop()

    def asked(reason: str) -> None:
        loop.call_soon_threadsafe(stop.request, reason)

    def drain() -> None:
        if on_drain is not None:
            loop.call_soon_threadsafe(on_drain)

    with signals(asked, drain if on_drain else None, on_force):
        logger.info("started service=%s pid=%d", name, os.getpid())
        await main(stop)
        logger.info("ended service=%s reason=%s", name, stop.reason or "done")


def log_failure(name: str, error: BaseException) -> None:
    """Log why a service failed: a defect with its traceback, our own errors without; reason last."""
    leaves = list(_leaves(error))
    ours = all(isinstance(leaf, RolloutMQError) for leaf in leaves)
    logger.error("failed service=%s", name, exc_info=None if ours else error)
    reason = "; ".join(dict.fromkeys(map(_one_line, leaves)))
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what a TaskGroup wrapped, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, RolloutMQError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load_run(run_dir: Path) -> tuple[RunConfig, RunLayout]:
    """Read the resolved configuration of a run.

    Raises:
        MissingError: The directory holds no run.
        ConfigError: Its configuration is not valid, for example of another version.
    """
    layout = RunLayout(run_dir)
    try:
        data = layout.config.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(str(layout.config), "start the run with `rolloutmq up`") from None
    try:
        return RunConfig.model_validate_json(data), layout
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(map(str, first["loc"])) or "config", first["msg"]) from None


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of a struct, a pydantic model or plain data.

    Readers see the old file or the new one, whole. Atomic against the death of this process, not
    against loss of power: nothing is synced to disk.
    """
    if isinstance(value, BaseModel):
        data = value.model_dump_json(indent=1).encode()
    else:
        data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    written.write_bytes(data + b"\n")
    written.replace(path)


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Read what `write_json` wrote, or None where there is nothing.

    Raises:
        msgspec.DecodeError: The file is not of this kind.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=kind)


async def wait_json(path: Path, kind: type[_T]) -> _T:
    """Wait for the file of another process, however late it starts. Cancellation is safe."""
    # The file is another process's: there is no event to wait for.
    while (found := read_json(path, kind)) is None:  # noqa: ASYNC110
        await asyncio.sleep(FILE_POLL_S)
    return found
