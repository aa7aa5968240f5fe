"""One rank of a trainer as a process, fed from memory: `python -m tests.trainer.support.rank_player ...`

The batch of a step is the same for every rank; each rank gets every n-th group of it, and in the third step the first
rank gets all. With a teacher, the rewards of the last group are all equal, and in odd steps those of every other
group,
so that the second of two ranks learns from the teacher alone. If the run directory names a vLLM, the weights are
transferred to it. A rank that is to die at a pull exits there at once; for a negative number the first rank fails
there
with an error, and the others lose it. The names of the native threads are recorded during the meeting and after it.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.trainer.support.teacher_answers import said
from tests.trainer.support.toy import MemoryBroker, run_config, some_group

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.config.trainer import WeightsConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.distillation import TeacherLogprobs
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.loop import run_to_exit_code, train
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


def groups_of(
    rank: int, size: int, teacher_logprobs: TeacherLogprobs = TeacherLogprobs.NONE
) -> Callable[[int, PolicyVersion], list[Group]]:
    def make(step: int, version: PolicyVersion) -> list[Group]:
        whole = [group_of(step, number, version, teacher_logprobs) for number in range(4)]
        if step == UNEVEN:
            return [] if rank else whole
        return whole[rank::size]

    return make


def group_of(step: int, number: int, version: PolicyVersion, teacher_logprobs: TeacherLogprobs) -> Group:
    name = f"s{step}-{number}"
    scores = (np.arange(8) % (number + 2)).tolist()
    if teacher_logprobs is TeacherLogprobs.NONE:
        return some_group(name, scores, seed=step, version=version)
    if number == 3 or (number % 2 and step % 2):
        scores = [1] * 8
    plain = some_group(name, scores, seed=step)
    told = {TeacherLogprobs.TOP_K: TOP_K, TeacherLogprobs.FULL: VOCABULARY}.get(teacher_logprobs, 1 + number)
    return some_group(name, scores, seed=step, version=version, **said(plain, told, VOCABULARY, seed=number))


def taught_by(teacher_logprobs: TeacherLogprobs) -> dict[str, Any]:
    return {"kind": teacher_logprobs.value, "top_k": TOP_K, "weight": 0.5}


def native_threads() -> list[str]:
    return [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]


def main(run_dir: str, rank: str, size: str, dtype: str, dies_at: str, teacher_logprobs: str) -> int:
    during: list[str] = []
    code = run_to_exit_code(partial(play, run_dir, rank, size, dtype, dies_at, teacher_logprobs, during))
    threads = {"during": during, "after": native_threads()}
    write_json(Path(run_dir) / f"rank{rank}.threads", threads)
    return code


def play(
    run_dir: str, rank: str, size: str, dtype: str, dies_at: str, teacher_logprobs: str, threads: list[str]
) -> int:
    torch.set_num_threads(1)
    layout = RunLayout(Path(run_dir))
    broker = MemoryBroker(groups_of(int(rank), int(size), TeacherLogprobs(teacher_logprobs)))
    config = config_of(dtype, ranks=int(size), distillation=taught_by(TeacherLogprobs(teacher_logprobs)))

    def pulled(number: int) -> None:
        threads[:] = native_threads()
        if number == int(dies_at):
            os._exit(9)
        if number == -int(dies_at) and rank == "0":
            raise ValueError("the first rank fails")

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
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
