"""Values of data sets as msgpack can carry them."""

import msgspec
import numpy as np
import torch

from rolloutmq.trainer.integrations.task_feed.payloads import content_digest, plain


def test_plain_values_have_no_numpy_and_no_torch() -> None:
    given = {"a": (np.float32(0.5), [np.array([True])]), 1: b"x", "t": torch.tensor([[1, 2]])}
    assert plain(given) == {"a": [0.5, [[True]]], "1": b"x", "t": [[1, 2]]}


def test_objects_inside_of_an_array_are_plain_too() -> None:
    """As in a column of a data frame."""
    inside = np.array([{"n": np.int64(3), "of": np.arange(2)}, None], dtype=object)
    assert plain(inside) == [{"n": 3, "of": [0, 1]}, None]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain({"rows": inside}))) == {
        "rows": [{"n": 3, "of": [0, 1]}, None]
    }


def test_a_digest_depends_on_the_content_alone() -> None:
    one = content_digest({"a": 1, "b": [0.1]})
    assert one == content_digest({"b": [0.1], "a": 1})
    assert one != content_digest({"b": [0.2], "a": 1})
    assert len(content_digest({1, 2})) == 24, "the broker's client says that it is no payload"
