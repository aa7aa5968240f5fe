from itertools import islice

import numpy as np

from benchmarks.harness import workload
from benchmarks.harness.workload import Shape
from rolloutmq.bus.encoding.codec import decode_group, encode_group, header_of
from rolloutmq.schemas.wire.envelope import GROUP_LIMIT_BYTES

SHAPE = Shape(8, 64)


def test_a_shape_survives_a_command_line() -> None:
    assert Shape.parse(SHAPE.word) == SHAPE


def test_a_shape_of_so_many_bytes_has_about_as_many_on_the_wire() -> None:
    shape = Shape.of_bytes(134_000)
    group = workload.pool(shape)[0]
    assert abs(shape.nbytes - 134_000) < 100
    assert shape.nbytes <= encode_group(group, GROUP_LIMIT_BYTES).nbytes < shape.nbytes * 1.01
    assert str(shape) == "groups of 8 x 1,861 tokens, 134 kB"


def test_the_large_ones_are_told_in_megabytes() -> None:
    assert str(Shape(16, 8192)) == "groups of 16 x 8,192 tokens, 1.18 MB"


def test_fresh_groups_have_ids_of_their_own_and_go_round_the_pool() -> None:
    made = workload.pool(Shape(8, 30_000))
    groups = list(islice(workload.fresh(made, "p"), 2 * len(made)))
    assert len({group.group_id for group in groups}) == 2 * len(made)
    assert groups[0].columns is groups[len(made)].columns
    assert len(made) * Shape(8, 30_000).nbytes <= workload.POOL_BYTES
    assert not np.array_equal(groups[0].columns["tokens"].values, groups[1].columns["tokens"].values)


def test_two_producers_have_different_groups() -> None:
    first, second = (workload.pool(Shape(8, 400_000), seed)[0] for seed in (0, 1))
    assert not np.array_equal(first.columns["tokens"].values, second.columns["tokens"].values)


def test_the_bytes_of_the_rival_are_those_of_the_groups() -> None:
    shape = Shape(8, 100_000)
    group, body = workload.pool(shape)[0], workload.bodies(shape)[0]
    encoded = encode_group(group, GROUP_LIMIT_BYTES)
    assert body == b"".join(encoded.frames)
    header = header_of(group, encoded, seq=1, position=encoded.nbytes)
    again = decode_group(header, encoded.table, encoded.frames)
    assert np.array_equal(again.columns["tokens"].values, group.columns["tokens"].values)


def test_lists_say_what_arrays_say() -> None:
    arrays, lists = workload.columns(SHAPE, 3), workload.lists(SHAPE, 3)
    assert type(lists["tokens"][0][0]) is int
    assert type(lists["mask"][0][0]) is bool
    assert all(np.array_equal(np.array(lists[name], arrays[name].dtype), arrays[name]) for name in arrays)
