"""Payloads of tasks: values of a trainer's data set as msgpack can carry them. Pure."""

from collections.abc import Mapping
from typing import Any

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
