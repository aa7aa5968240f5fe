"""The rival's side of `transferqueue`, run by the interpreter of its own environment; imports nothing of ours.

    python benchmarks/queues/transferqueue_client.py BATCH TOKENS LASTS_S

Prints `ready`; replies to `single` and `batch` on its input with samples per second.
"""

import sys
import time
from collections.abc import Callable
from itertools import count

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

CPUS = 4
"""CPUs that ray assigns to actors: controller and two storage units need one each, however many exist."""
PARTITION = "bench"


def main(batch: int, tokens: int, lasts_s: float) -> None:
    """Reply until the input ends."""
    ray.init(
        namespace="bench", num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    tq.init()
    samples = made(batch, tokens)
    numbers = count()
    for _ in range(2):
        put_and_get(samples, numbers)
    parts: dict[str, Callable[[], float]] = {
        "single": lambda: single(samples, numbers, lasts_s),
        "batch": lambda: batches(samples, numbers, lasts_s),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        print(parts[line.strip()](), flush=True)


def made(batch: int, tokens: int) -> TensorDict:
    """Return samples of ids, log-probabilities and a mask: 13 bytes a token."""
    size = (batch, tokens)
    fields = {
        "tokens": torch.randint(0, 150_000, size),
        "logprobs": torch.randn(size),
        "mask": torch.ones(size, dtype=torch.bool),
    }
    return TensorDict(fields, batch_size=batch)


def single(samples: TensorDict, numbers: "count[int]", lasts_s: float) -> float:
    """Put one sample at a time."""
    ones = [samples[index : index + 1] for index in range(len(samples))]
    keys: list[str] = []
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < lasts_s:
        key = str(next(numbers))
        tq.kv_put(key=key, partition_id=PARTITION, fields=ones[len(keys) % len(ones)])
        keys.append(key)
    tq.kv_clear(keys=keys, partition_id=PARTITION)
    return len(keys) / spent


def batches(samples: TensorDict, numbers: "count[int]", lasts_s: float) -> float:
    """Put a batch and get it, repeatedly; clearing it is not timed."""
    done, spent = 0, 0.0
    while spent < lasts_s:
        spent += put_and_get(samples, numbers)
        done += len(samples)
    return done / spent


def put_and_get(samples: TensorDict, numbers: "count[int]") -> float:
    """Put and get one batch and return the seconds."""
    keys = [str(next(numbers)) for _ in range(len(samples))]
    started = time.perf_counter()
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=samples)
    got = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
    spent = time.perf_counter() - started
    assert len(got["tokens"]) == len(samples)
    tq.kv_clear(keys=keys, partition_id=PARTITION)
    return spent


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
