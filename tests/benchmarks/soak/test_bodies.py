from dataclasses import replace

import numpy as np
import pytest

from benchmarks.soak.bodies import LARGEST_BYTES, GroupName, is_whole, made
from rolloutmq.bus.encoding.codec import encode_group, group_bytes
from rolloutmq.schemas.group import Column

IDS = [f"p{producer}.3-{number}" for producer in range(2) for number in range(400)]


def test_groups_have_the_sizes_of_a_run() -> None:
    sizes = sorted(group_bytes(made(name)) for name in IDS)
    assert sizes[0] < 450
    assert sizes[len(sizes) // 2] < 2000
    assert 20_000 < sizes[-1] <= 2 * LARGEST_BYTES
    assert {made(name).sequences for name in IDS} == {1, 2, 4, 8}


def test_a_group_follows_from_its_id() -> None:
    assert all(is_whole(made(name)) for name in IDS[:50])
    for name in IDS[:50]:
        made(name).check()


def test_no_two_groups_are_alike() -> None:
    assert len({encode_group(made(name), 1 << 30).crc for name in IDS}) == len(IDS)


def test_another_groups_contents_are_noticed() -> None:
    assert not is_whole(replace(made(IDS[0]), columns=made(IDS[1]).columns))
    assert not is_whole(replace(made(IDS[0]), group_id=IDS[1]))


@pytest.mark.parametrize("column", ["tokens", "mask", "scores", "inference_logprobs"])
def test_one_wrong_value_is_noticed(column: str) -> None:
    group = made(IDS[0])
    before = group.columns[column]
    values = before.values.copy()
    values[-1] = values[-1] == 0
    torn = replace(group, columns={**group.columns, column: Column(before.dtype, values, before.lengths)})
    assert not is_whole(torn)


def test_a_missing_column_or_sequence_is_noticed() -> None:
    group = made(IDS[0])
    some = {name: column for name, column in group.columns.items() if name != "mask"}
    assert not is_whole(replace(group, columns=some))
    assert not is_whole(replace(group, sequences=group.sequences + 1))


def test_rows_cut_elsewhere_are_noticed() -> None:
    group = next(made(name) for name in IDS if made(name).sequences > 1)
    tokens = group.columns["tokens"]
    (rows,) = tokens.lengths
    moved = rows.copy()
    moved[0], moved[1] = moved[0] + 1, moved[1] - 1
    assert moved.dtype == np.uint32
    cut = Column(tokens.dtype, tokens.values, (moved,))
    assert not is_whole(replace(group, columns={**group.columns, "tokens": cut}))


def test_ids_are_read_back() -> None:
    assert GroupName.parse("p0.3-17") == GroupName("p0", 3, 17)
    assert str(GroupName("p0", 3, 17)) == "p0.3-17"
    assert GroupName.parse("p0.3") is None
