import pytest

from benchmarks.training import scoring

NARROW = 32
"""The table is as large with narrow hidden states, and sooner made."""


@pytest.mark.extended
def test_probabilities_in_parts_take_two_fifths_of_the_memory_at_most() -> None:
    parts, whole = (scoring.peak_mb(way, NARROW) for way in ("parts", "whole"))
    assert whole > 1000  # several tables of half a gigabyte, or nothing was measured
    assert parts <= scoring.MEMORY_GOAL * whole
