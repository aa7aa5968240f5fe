"""Orders of a live view: each is a command of the command line, run as a process.

A command in a process of its own has the checks, errors and confirmation of a typed one, and neither its output nor its
waits touch the view. A name from a peer is an argument behind `--`, so it is never an option.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from rolloutmq.schemas.printable import printable_lines

OUTPUT_LIMIT_BYTES: Final = 1 << 20
"""Most output of a command that is shown."""


class Order(NamedTuple):
    """A command for the run of the view.

    Attributes:
        command: Name of the command.
        arguments: Its arguments, unchecked names among them.
        options: Its options.
        note: What to know before it is carried out; empty if it changes nothing, and needs no question.
    """

    command: str
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    note: str = ""

    @property
    def text(self) -> str:
        """Return the order in a few words."""
        return " ".join((self.command, *self.arguments))


class Answer(NamedTuple):
    """Exit code and output of a command, without control characters."""

    code: int
    text: str


async def carry_out(program: Sequence[str], run_dir: str, order: Order) -> Answer:
    """Run the command of an order and return its answer. Raises nothing but a cancellation, which ends the command.

    Args:
        program: Command line of `rolloutmq`, without arguments.
        run_dir: Run directory.
        order: The order.
    """
    words = [*program, order.command, *order.options, "--run-dir", run_dir, "--", *order.arguments]
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # no process can be started, or a name has a NUL
        return Answer(1, f"{order.command}: cannot be started: {error}")
    try:
        output = await _output(process)
        code = await process.wait()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    return Answer(code, printable_lines(output.decode(errors="replace")).strip())


async def _output(process: asyncio.subprocess.Process) -> bytes:
    """Read all output, and keep its beginning."""
    assert process.stdout is not None
    kept = bytearray()
    while data := await process.stdout.read(1 << 16):
        kept += data[: OUTPUT_LIMIT_BYTES - len(kept)]
    return bytes(kept)
