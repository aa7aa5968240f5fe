"""The wheel, installed in its own directory outside this repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("bus", "launch", "schemas", "services", "testing", "trainer")


def run(cwd: Path, site: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with the wheel's packages before those of this environment."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from what git would commit and unpacked."""
    work = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    tree = work / "tree"
    for name in (os.fsdecode(name) for name in names if name):
        if os.path.lexists(ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(ROOT / name, tree / name)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work)]
    subprocess.run([sys.executable, *build, str(tree)], check=True, capture_output=True, timeout=120)
    (wheel,) = work.glob("rolloutmq-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "site")
    return work / "site"


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(source.readlink())
    else:
        target.write_bytes(source.read_bytes())


def test_it_holds_every_module_and_template(site: Path) -> None:
    for floor in FLOORS:
        sources = {path.relative_to(ROOT) for path in (ROOT / floor).rglob("*") if path.is_file()}
        wanted = {path for path in sources if "__pycache__" not in path.parts}
        found = {path.relative_to(site / "rolloutmq") for path in (site / "rolloutmq" / floor).rglob("*")}
        assert wanted <= found
    assert (site / "rolloutmq" / "py.typed").exists()


def test_a_project_made_by_it_passes_its_own_test(site: Path, tmp_path: Path) -> None:
    where = run(tmp_path, site, "-c", "import rolloutmq; print(rolloutmq.__file__)").stdout
    assert str(site) in where
    run(tmp_path, site, "-m", "rolloutmq.launch.cli", "init", "my-task")
    done = run(tmp_path / "my-task", site, "-m", "pytest", "-q")
    assert "3 passed" in done.stdout
