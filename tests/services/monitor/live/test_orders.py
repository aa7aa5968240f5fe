"""An order is a command of its own, whatever its name is."""

import asyncio
import sys
from contextlib import suppress

from rolloutmq.services.monitor.live.orders import OUTPUT_LIMIT_BYTES, Answer, Order, carry_out

ECHO = (sys.executable, "-c", "import sys; print(*sys.argv[1:], sep='|'); sys.exit(3)")


async def test_names_are_arguments_and_never_options() -> None:
    order = Order("drain", ("--now",), ("--reason", "x"), "note")
    assert await carry_out(ECHO, "runs/a", order) == Answer(3, "drain|--reason|x|--run-dir|runs/a|--|--now")


async def test_control_characters_of_the_output_are_escaped_and_much_of_it_is_cut() -> None:
    many = (sys.executable, "-c", f"print('\\x1b[2J' + 'x' * {3 * OUTPUT_LIMIT_BYTES})")
    answer = await carry_out(many, "r", Order("explain", ("g",)))
    assert answer.text.startswith(r"\u001b[2Jxx")
    assert len(answer.text) < OUTPUT_LIMIT_BYTES + 100


async def test_a_command_that_cannot_be_started_is_an_answer() -> None:
    assert (await carry_out(("/no/such/program",), "r", Order("drain", ("w",)))).code == 1
    assert (await carry_out(ECHO, "r", Order("drain", ("w\0",)))).code == 1


async def test_an_order_that_is_cancelled_ends_its_command() -> None:
    slow = (sys.executable, "-c", "import time; time.sleep(600)")
    task = asyncio.create_task(carry_out(slow, "r", Order("drain", ("w",))))
    await asyncio.sleep(0.05)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    # The fixture of all tests fails this one if the process is left.
