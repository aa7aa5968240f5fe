"""What `make` installs is pinned with hashes, complete, and no larger than it has to be."""

import os
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tests.house.requirements.lock import MACHINES, PYTHONS, hashes_in, header_of, locked, name_of, pins_of

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
EXTRAS = ("trainer", "lora", "report", "docs", "dev")
FAKE = """#!/bin/sh
# A Python that notes how it is called, makes environments of itself, and knows no package of the files in `missing`.
echo "$@" >> "{log}"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *{missing}*) echo "ERROR: No matching distribution found" >&2; exit 1 ;;
    *) echo "Collecting something" ;;
esac
"""


def versions_of(*names: str) -> dict[str, str]:
    pins = [pin for name in names for pin in pins_of((ROOT / "requirements" / name).read_text())]
    return {name_of(pin): pin.split("==")[1] for pin in pins}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_every_package_has_hashes(file: Path) -> None:
    text = file.read_text()
    assert header_of(text)
    blocks = text.removeprefix(header_of(text)).replace("\\\n", "").splitlines()
    assert len(blocks) == len(pins_of(text)) > 0
    for block in blocks:
        pin, *hashes = block.split()
        assert "==" in pin
        assert hashes, f"{pin} has no hash"
        assert all(one.startswith("--hash=sha256:") and len(one) == 78 for one in hashes)


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (("cp311-cp311-manylinux_2_17_x86_64.whl", "cp39-abi3-manylinux_2_31_x86_64.whl", "sdist"), [0]),
        (("cp39-abi3-manylinux_2_31_x86_64.whl", "cp39-abi3-musllinux_1_2_x86_64.whl", "sdist"), [0]),
        (("cp39-abi3-win_amd64.whl", "sdist"), [1]),
        (("cp39-abi3-win_amd64.whl",), []),
    ],
)
def test_a_source_distribution_is_the_last_choice(files: tuple[str, ...], chosen: list[int]) -> None:
    """To build one may want a compiler that a newcomer lacks, such as that of Rust."""
    names = ["some-1.0.tar.gz" if end == "sdist" else f"some-1.0-{end}" for end in files]
    listing = {"files": [{"filename": name, "hashes": {"sha256": str(at)}} for at, name in enumerate(names)]}
    assert hashes_in(listing, Version("1.0")) == [str(at) for at in chosen]


def test_the_pins_are_complete_for_every_python_and_machine() -> None:
    """No package needs another one, or another version, than those of the files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(one for each in EXTRAS for one in project["optional-dependencies"][each]),
    ]
    small = metadata.version("torch").endswith("+cpu")
    versions = versions_of("dev.txt", "torch-cpu.txt" if small else "torch-cuda.txt")
    for python in PYTHONS:
        for machine in MACHINES:
            _require_pinned(asked, versions, python, machine)


def _require_pinned(asked: list[str], versions: dict[str, str], python: str, machine: str) -> None:
    target = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": machine,
    }
    todo = [(Requirement(text), "the project") for text in asked]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted, by = todo.pop()
        name = name_of(wanted.name)
        assert name in versions, f"{name}, needed by {by} on Python {python} and {machine}, is not pinned"
        assert wanted.specifier.contains(versions[name], prereleases=True), f"{by} needs {wanted}"
        if (name, extras := frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, extras))
        for inner in map(Requirement, metadata.requires(name) or ()):
            marks = [{**target, "extra": extra} for extra in (*extras, "")]
            if inner.marker is None or any(map(inner.marker.evaluate, marks)):
                todo.append((inner, name))


def test_this_environment_has_the_pinned_versions() -> None:
    found = {name: metadata.version(name) for name in versions_of("dev.txt")}
    assert found == versions_of("dev.txt")
    assert metadata.version("torch").partition("+")[0] == versions_of("torch-cuda.txt")["torch"]


def test_torch_is_the_small_one() -> None:
    assert versions_of("torch-cpu.txt") == {"torch": f"{versions_of('torch-cuda.txt')['torch']}+cpu"}
    for file in FILES:
        if file.name != "torch-cuda.txt":
            large = [
                name for name in versions_of(file.name) if name.startswith(("nvidia-", "cuda-", "triton"))
            ]
            assert set(large) <= {"nvidia-ml-py"}, file.name
        if not file.name.startswith("torch-"):
            assert "torch" not in versions_of(file.name), file.name


@pytest.mark.parametrize("missing", ["", "torch-cpu.txt"])
def test_make_installs_nothing_without_a_hash_and_says_at_once_that_it_does(
    tmp_path: Path, missing: str
) -> None:
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(FAKE.format(log=log, missing=missing or "absent.txt"))
    python.chmod(0o755)
    command = ["make", f"VENV={tmp_path}/venv", f"PYTHON={python}", f"{tmp_path}/venv/.installed"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"setting up {tmp_path}/venv: ")
    made, *installs = log.read_text().splitlines()
    assert made == f"-m venv {tmp_path}/venv"
    *locked_ones, own, check = installs
    assert check.startswith("-m pip check")
    files = [words.rpartition(" ")[2] for words in locked_ones]
    large = ["requirements/torch-cuda.txt"] if missing else []
    assert files == ["requirements/dev.txt", "requirements/torch-cpu.txt", *large]
    for words in locked_ones:
        assert "--require-hashes" in words
        assert "--no-deps" in words
    assert own.endswith("--no-deps --no-build-isolation --editable .")
    assert not [words for words in installs if "--quiet" in words]
    assert ("name PyTorch's index" in done.stdout) == bool(missing)


def test_a_file_keeps_its_comment_and_its_markers() -> None:
    text = "# Why.\nb==2 \\\n    --hash=sha256:old\nA_a[x]==1; python_version < '3.12'\n"
    pins = pins_of(text)
    assert pins == ["b==2", "A_a[x]==1; python_version < '3.12'"]
    assert [name_of(pin) for pin in pins] == ["b", "a-a"]
    assert locked(text, {pins[0]: ["1", "2"], pins[1]: ["3"]}) == (
        "# Why.\n"
        "A_a[x]==1; python_version < '3.12' \\\n    --hash=sha256:3\n"
        "b==2 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
    )
