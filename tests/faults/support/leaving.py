"""A producer process that opens, sends on command, and leaves in order; run as a module.

It prints `open` once it is registered and the groups of an earlier life are acked, and `leaving` once every group is
handed over. Arguments: run directory, spool file, ack log, prefix of the group ids, number of groups.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from rolloutmq.bus.producer.client import Producer
from rolloutmq.schemas.group import Group

DRAIN_S = 0.1
TOKENS = 200


def made(name: str) -> Group:
    """Return a group of about a kilobyte: the same for the same name."""
    tokens = np.full((1, TOKENS), len(name), np.int32)
    return Group.build(name, tokens=tokens, mask=np.ones((1, TOKENS), bool), scores=[0.0])


def names(prefix: str, count: int) -> list[str]:
    """Return the ids of the groups."""
    return [f"{prefix}-{number}" for number in range(count)]


def say(word: str) -> None:
    """Print a line for the parent."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def live(run_dir: Path, spool: Path, log: Path, prefix: str, count: int) -> None:
    """Run the producer."""
    opened = Producer.open(run_dir, env="e", producer="p", save_to=spool, ack_log=log, drain_s=DRAIN_S)
    async with opened as producer:
        say("open")
        await asyncio.to_thread(sys.stdin.readline)
        for name in names(prefix, count):
            await producer.send(made(name))
        say("leaving")


if __name__ == "__main__":
    run_at, spool_at, log_at, life, groups = sys.argv[1:]
    asyncio.run(live(Path(run_at), Path(spool_at), Path(log_at), life, int(groups)))
