"""A worker process that answers tasks. It prints a line for each task it takes.

The payload is `[group id, ...names]`: a worker with one of the names hangs with the task in hand, others answer it
with the group of that id.
"""

import asyncio
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from tests.faults.support.processes import IMPATIENCE, SEQUENCES, made

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.tasks import connection
from rolloutmq.bus.tasks import taker as taking
from rolloutmq.bus.tasks.taker import TaskTaker


async def _answer(run_dir: Path, name: str) -> None:
    async with (
        Producer.open(
            run_dir,
            env="e",
            producer=name,
            group_size=SEQUENCES,
            ack_log=run_dir.with_name(f"{name}.acks"),
        ) as producer,
        TaskTaker.open(run_dir, name, lambda: producer.session) as taker,
    ):
        while True:
            (task,) = await taker.take()
            print(task.id, flush=True)  # noqa: T201 - the test listens
            group_id, *names = task.payload
            if name in names:
                await asyncio.Event().wait()
            await producer.send(replace(made(group_id, 2000), task=task.id))


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for module, attribute, value in (
        *IMPATIENCE,
        (taking, "POLL_S", 0.3),
        (connection, "PATIENCE_S", 0.5),
        (connection, "REPEAT_S", 0.1),
    ):
        setattr(module, attribute, value)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_answer(Path(sys.argv[1]), sys.argv[2]))
