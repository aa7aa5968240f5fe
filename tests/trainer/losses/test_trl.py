"""TRL's own losses on newly drawn tokens, computed in its environment, equal ours."""

import subprocess
from pathlib import Path

import pytest
from tests.trainer.losses.golden.tensors import GOLDEN, MAKE, read
from tests.trainer.losses.test_golden import assert_same

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-trl/bin/python"

pytestmark = pytest.mark.rival


def made(seed: int, out: Path) -> Path:
    subprocess.run([PYTHON, MAKE, str(seed), out], check=True, timeout=120, cwd=ROOT)
    return out


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_losses_are_those_of_trl(seed: int, tmp_path: Path) -> None:
    for known in read(made(seed, tmp_path / "losses.json")):
        assert_same(known)


def test_the_golden_file_is_what_its_script_makes(tmp_path: Path) -> None:
    fresh, kept = read(made(16, tmp_path / "losses.json")), read(GOLDEN)
    assert [known.name for known in fresh] == [known.name for known in kept]
    for one, other in zip(fresh, kept, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12, abs=1e-12)
        assert one.gradient.tolist() == pytest.approx(other.gradient.tolist(), rel=1e-12, abs=1e-12)
