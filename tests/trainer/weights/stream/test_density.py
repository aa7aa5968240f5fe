"""Density: versions that change nearly everything are sent without digests, for a while."""

import numpy as np

from rolloutmq.trainer.weights.stream.chunks import Digests, unknown
from rolloutmq.trainer.weights.stream.density import AGAIN, Density


def table(version: int, changed: int = 100) -> Digests:
    """The digests of a version, of 100 chunks; the first ones change with it."""
    made = unknown(100)
    made["known"] = 1
    made["crc"][:changed] = version
    return made


def test_two_versions_that_differ_everywhere_let_the_next_ones_go_whole() -> None:
    density = Density()
    for version in (1, 2):
        assert not density.begin()
        density.learn(str(version), table(version))
    assert [density.begin() for _ in range(AGAIN)] == [True] * AGAIN
    for version in (90, 91):
        assert not density.begin(), "it looks again"
        density.learn(str(version), table(version))
    assert density.begin()


def test_versions_that_differ_in_few_chunks_are_compared_each_time() -> None:
    density = Density()
    for version in range(1, 9):
        assert not density.begin()
        density.learn(str(version), table(version, changed=60))


def test_the_same_write_and_another_layout_say_nothing() -> None:
    density = Density()
    density.learn("1", table(1))
    density.learn("1", table(2))
    density.learn("2", np.concatenate([table(3), table(3)]))
    assert not density.begin()
