"""Payloads of tasks: values of a trainer's data set as msgpack can carry them. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np


def plain(value: Any) -> Any:
    """Return a value without numpy and torch, at any depth; what is unknown stays as it is."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())  # an array of objects may have anything in it
    return value.tolist() if hasattr(value, "tolist") else value


def content_digest(content: Any) -> str:
    """Return a digest of what a task is about, 24 hexadecimal digits: the same in every process."""
    try:
        encoded = msgspec.msgpack.encode(content, order="deterministic")
    except (
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ):  # the submission says what is wrong with it
        encoded = repr(content).encode()
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()
