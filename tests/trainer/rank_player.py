"""One rank of a trainer in a process of its own, fed from memory: `python -m tests.trainer.rank_player ...`

The batch of a step is the same whoever asks; each rank gets every so-manieth group of it, and in the third step the
first rank gets all of them. Where there is a teacher the rewards of the last group are all the same, and in odd
steps those of every other group, so that the second of two ranks learns from the teacher alone. Where the run
directory says that there is a vLLM, the weights are sent to it.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.trainer.sayings import said
from tests.trainer.toy import MemoryBroker, run_config, some_group

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config import ModelConfig, RunConfig
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.teaching import Lore
from rolloutmq.schemas.training import WeightsConfig
from rolloutmq.schemas.trajectory import Group
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.ranks import met

STEPS = 5
UNEVEN = 3
TOP_K = 4
VOCABULARY = ModelConfig().vocab_size


def config_of(dtype: str, **trainer: Any) -> RunConfig:
    again = dtype == "bfloat16"
    small = {"steps": STEPS, "checkpoint_interval": 2, "micro_batch_tokens": 64, "recompute_blocks": again}
    base = run_config(**(small | trainer))
    return base.model_copy(update={"model": base.model.model_copy(update={"dtype": dtype})})


def groups_of(rank: int, size: int, lore: Lore = Lore.NONE) -> Callable[[int, PolicyVersion], list[Group]]:
    def make(step: int, version: PolicyVersion) -> list[Group]:
        whole = [group_of(step, number, version, lore) for number in range(4)]
        if step == UNEVEN:
            return [] if rank else whole
        return whole[rank::size]

    return make


def group_of(step: int, number: int, version: PolicyVersion, lore: Lore) -> Group:
    name = f"s{step}-{number}"
    scores = (np.arange(8) % (number + 2)).tolist()
    if lore is Lore.NONE:
        return some_group(name, scores, seed=step, version=version)
    if number == 3 or (number % 2 and step % 2):
        scores = [1] * 8
    plain = some_group(name, scores, seed=step)
    told = {Lore.TOP_K: TOP_K, Lore.FULL: VOCABULARY}.get(lore, 1 + number)
    return some_group(name, scores, seed=step, version=version, **said(plain, told, VOCABULARY, seed=number))


def taught_by(lore: Lore) -> dict[str, Any]:
    return {"kind": lore.value, "top_k": TOP_K, "weight": 0.5}


def main(run_dir: str, rank: str, size: str, dtype: str, dies_at: str, lore: str) -> None:
    torch.set_num_threads(1)
    layout = RunLayout(Path(run_dir))
    broker = MemoryBroker(groups_of(int(rank), int(size), Lore(lore)))
    config = config_of(dtype, ranks=int(size), distillation=taught_by(Lore(lore)))

    def pulled(number: int) -> None:
        if number == int(dies_at):
            os._exit(9)

    if layout.vllm.exists():
        config = config.model_copy(update={"weights": WeightsConfig(backend="vllm_http")})
    broker.on_pull = pulled
    with met(layout.ranks, int(rank), int(size), config.trainer.rank_patience_s) as ranks:
        reached = train(config, layout, Stop(), broker.connect, ranks)
    told = {
        "reached": reached.step,
        "losses": {event.step: event.loss for event in broker.events},
        "metrics": {event.step: event.extra for event in broker.events},
        "groups": {event.step: event.groups for event in broker.events},
        "commits": [version.step for version in broker.commits],
        "settled": [[one["version"].step, list(one["trained"])] for one in broker.settled],
    }
    write_json(layout.root / f"rank{rank}.told", told)


if __name__ == "__main__":
    main(*sys.argv[1:])
