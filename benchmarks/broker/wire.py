"""Encoding and decoding of a group, against the JSON of comparable HTTP servers; one process, no sockets."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.row import Row, compare
from rolloutmq.bus.encoding.codec import decode_group, encode_group, header_of
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import GROUP_LIMIT_BYTES

SEQUENCES, TOKENS = 8, 2048
LASTS_S = 0.5
"""Duration of each side in one round."""


def rows() -> Iterator[Row]:
    """Groups a second through encode and decode, from arrays and from Python lists."""
    arrays = {
        "tokens": np.arange(SEQUENCES * TOKENS, dtype=np.int32).reshape(SEQUENCES, TOKENS) % 32000,
        "mask": np.ones((SEQUENCES, TOKENS), bool),
        "scores": np.linspace(0.0, 1.0, SEQUENCES),
        "inference_logprobs": np.linspace(-9.0, 0.0, SEQUENCES * TOKENS).reshape(SEQUENCES, TOKENS),
    }
    lists = {name: values.tolist() for name, values in arrays.items()}
    payload = f"{SEQUENCES} x {TOKENS} tokens"
    for source, columns in (("arrays", arrays), ("lists", lists)):
        yield compare(
            f"wire round trip from {source}, groups/s",
            payload,
            partial(_rate, partial(_ours, columns)),
            partial(_rate, partial(_json, lists)),
            "JSON and gzip",
        )


def _ours(columns: dict[str, Any]) -> None:
    group = Group.build("g", **columns)
    encoded = encode_group(group, GROUP_LIMIT_BYTES)
    header = header_of(group, encoded, seq=1, position=encoded.nbytes)
    decode_group(header, encoded.table, encoded.frames)


def _json(lists: dict[str, object]) -> None:
    json.loads(gzip.decompress(gzip.compress(json.dumps(lists).encode(), 9)))


def _rate(work: Callable[[], None]) -> float:
    work()
    count, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < LASTS_S:
        work()
        count += 1
    return count / spent
