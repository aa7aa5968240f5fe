"""Fixtures of the network tests: hosts that share nothing but two switches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network.support import hosts
from tests.network.support.hosts import Lab
from tests.network.support.site import Scene


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Switches without a host yet; everything on them ends with the test, which is skipped where that cannot be."""
    if problem := hosts.problem():
        pytest.skip(f"no network namespaces for this user: {problem}")
    with Lab(tmp_path / "lab") as made:
        yield made


@pytest.fixture
def scene(lab: Lab) -> Scene:
    """A scene in which groups of every producer are being trained."""
    made = Scene(lab)
    made.flows()
    return made
