"""What is in the source distribution and in the wheel, and that the wheel works alone."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from tests.house.distribution.checkout import ROOT
from tests.house.distribution.conftest import LINKS

FLOORS = ("bus", "launch", "schemas", "services", "testing", "trainer")
PAGES, IMAGES = (f"{LINKS.format(view=view)}/" for view in ("blob", "raw"))
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")


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


def modules_and_templates() -> set[str]:
    """Return the path below `rolloutmq` of each file of the package."""
    paths = [path for floor in FLOORS for path in (ROOT / floor).rglob("*") if path.is_file()]
    inside = {path.relative_to(ROOT) for path in paths}
    return {path.as_posix() for path in inside if "__pycache__" not in path.parts} | {
        "__init__.py",
        "py.typed",
    }


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="module")
def metadata(site: Path) -> Message:
    (file,) = site.glob("*.dist-info/METADATA")
    return message_from_bytes(file.read_bytes())


def test_the_sources_hold_the_package_in_place_of_its_links(sources: Path) -> None:
    with tarfile.open(sources) as archive:
        members = archive.getmembers()
    root = sources.name.removesuffix(".tar.gz")
    assert {member.type for member in members} == {tarfile.REGTYPE, tarfile.DIRTYPE}
    files = {member.name.removeprefix(f"{root}/") for member in members if member.isfile()}
    above = {name for name in files if not name.startswith("src/")}
    assert above == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    package = {name.removeprefix("src/rolloutmq/") for name in files if name.startswith("src/rolloutmq/")}
    assert package == modules_and_templates()


def test_the_wheel_holds_every_module_and_template_and_no_test(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = {name.removeprefix("rolloutmq/") for name in names if name.startswith("rolloutmq/")}
    assert files == modules_and_templates()
    beside = {Path(name).name for name in names if not name.startswith("rolloutmq/")}
    about = {"METADATA", "WHEEL", "RECORD", "LICENSE", "entry_points.txt", "top_level.txt"}
    assert beside == about | {"rolloutmq_program.py"}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_metadata_names_the_system_and_the_versions(metadata: Message) -> None:
    classifiers = metadata.get_all("Classifier") or []
    systems = [each for each in classifiers if each.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    versions = [each.rpartition(" ")[2] for each in classifiers if "Python :: 3." in each]
    assert versions == ["3.11", "3.12", "3.13"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_each_link_of_the_readme_leads_somewhere_on_an_index(metadata: Message) -> None:
    links = LINK.findall(str(metadata.get_payload()))
    assert len(links) == len(LINK.findall((ROOT / "README.md").read_text())) > 30
    for image, address in links:
        base = IMAGES if image else PAGES
        assert address.startswith(base), address
        assert (ROOT / address.removeprefix(base).partition("#")[0]).is_file(), address


def test_a_project_made_by_it_passes_its_own_test(site: Path, tmp_path: Path) -> None:
    where = run(tmp_path, site, "-c", "import rolloutmq; print(rolloutmq.__file__)").stdout
    assert str(site) in where
    run(tmp_path, site, "-m", "rolloutmq.launch.cli", "init", "my-task")
    done = run(tmp_path / "my-task", site, "-m", "pytest", "-q")
    assert "3 passed" in done.stdout
