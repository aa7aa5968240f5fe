import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.preflight.support import CLASSES


@pytest.fixture
def base_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory of a configuration, with environments."""
    (tmp_path / "tried.py").write_text(CLASSES)
    (tmp_path / "typo.py").write_text(
        "from rolloutmq import Ensemble, SingleTurn\n\n\nclass Typo(SingleTurn):\n"
        "    rewards = Ensemble({'a': 'exact'}, weights={'b': 1.0})\n"
    )
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("rolloutmq_entry_tried", "rolloutmq_entry_typo"):
        sys.modules.pop(name, None)
