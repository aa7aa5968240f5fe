"""One rank of a trainer in a process of its own, fed from memory: `python -m tests.trainer.rank_player ...`

The batch of a step is the same whoever asks; each rank gets every so-manieth group of it, and in the third step the
first rank gets all of them.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.trainer.toy import MemoryBroker, run_config, some_group

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.trajectory import Group
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.ranks import met

STEPS = 5
UNEVEN = 3


def config_of(dtype: str, **trainer: Any) -> RunConfig:
    again = dtype == "bfloat16"
    small = {"steps": STEPS, "checkpoint_interval": 2, "micro_batch_tokens": 64, "recompute_blocks": again}
    base = run_config(**(small | trainer))
    return base.model_copy(update={"model": base.model.model_copy(update={"dtype": dtype})})


def groups_of(rank: int, size: int) -> Callable[[int, PolicyVersion], list[Group]]:
    def make(step: int, version: PolicyVersion) -> list[Group]:
        whole = [
            some_group(f"s{step}-{n}", (np.arange(8) % (n + 2)).tolist(), seed=step, version=version)
            for n in range(4)
        ]
        if step == UNEVEN:
            return [] if rank else whole
        return whole[rank::size]

    return make


def main(run_dir: str, rank: str, size: str, dtype: str, dies_at: str) -> None:
    torch.set_num_threads(1)
    layout = RunLayout(Path(run_dir))
    broker = MemoryBroker(groups_of(int(rank), int(size)))

    def pulled(number: int) -> None:
        if number == int(dies_at):
            os._exit(9)

    broker.on_pull = pulled
    with met(layout.ranks, int(rank), int(size)) as ranks:
        reached = train(config_of(dtype, ranks=int(size)), layout, Stop(), broker.connect, ranks)
    told = {
        "reached": reached.step,
        "losses": {event.step: event.loss for event in broker.events},
        "norms": {event.step: event.extra["grad_norm"] for event in broker.events},
        "groups": {event.step: event.groups for event in broker.events},
        "commits": [version.step for version in broker.commits],
        "settled": [[one["version"].step, list(one["trained"])] for one in broker.settled],
    }
    write_json(layout.root / f"rank{rank}.told", told)


if __name__ == "__main__":
    main(*sys.argv[1:])
