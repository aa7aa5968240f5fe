"""The files of a release, built once from what git would commit."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.house.distribution.checkout import copy_checkout

LINKS = "https://github.com/OWNER/rolloutmq/{view}/v0.1.0"


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it, as `python -m build` does."""
    work = tmp_path_factory.mktemp("release")
    copy_checkout(work / "tree")
    _build("sdist", work / "tree", work / "dist")
    (sources,) = (work / "dist").glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        archive.extractall(work, filter="data")
    _build("wheel", work / sources.name.removesuffix(".tar.gz"), work / "dist")
    return work / "dist"


@pytest.fixture(scope="session")
def wheel(release: Path) -> Path:
    (found,) = release.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def sources(release: Path) -> Path:
    (found,) = release.glob("*.tar.gz")
    return found


def _build(kind: str, tree: Path, target: Path) -> None:
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "README_LINKS": LINKS},
        check=True,
        capture_output=True,
        timeout=300,
    )
