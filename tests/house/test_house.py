"""The rules of the repository: links, make targets, and the cost of an import."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ["bus", "launch", "schemas", "services", "testing", "trainer"]


@pytest.mark.parametrize("floor", FLOORS)
def test_the_package_is_links_to_the_top_folders(floor: str) -> None:
    link = ROOT / "src" / "rolloutmq" / floor
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / floor
    assert (ROOT / floor / "__init__.py").is_file()


def test_the_package_holds_nothing_else() -> None:
    found = {path.name for path in (ROOT / "src" / "rolloutmq").iterdir()} - {"__pycache__"}
    assert found == {"__init__.py", "py.typed", *FLOORS}


def test_every_promised_target_can_be_made() -> None:
    trainers = (
        "test-trl",
        "test-skyrl",
        "test-verl",
        "test-ray",
        "test-verifiers",
        "test-data",
        "test-export",
        "test-kubernetes",
    )
    rivals = (
        "test-atropos",
        *trainers,
        "test-dashboard",
        "test-install",
        "test-transferqueue",
        "test-vllm",
        "quickstart-vllm",
    )
    tests = ("test", "test-extended", "test-all")
    for target in (
        "quickstart",
        *tests,
        "check",
        "bench",
        "soak",
        "soak-faults",
        "fuzz",
        "accept",
        "clean",
        *rivals,
    ):
        shown = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert shown.stdout
    submission = (ROOT / ".ci" / "run").read_text()
    assert "\nmake check\nmake test\n" in submission
    left_out_if_late = re.findall(r"^run (\S+) (?:\d+$|\$\(\(SECONDS)", submission, re.MULTILINE)
    assert left_out_if_late == [
        "test-extended",
        "test-atropos",
        "test-trl",
        "test-skyrl",
        "test-verl",
        "test-ray",
        "test-verifiers",
        "test-data",
        "test-export",
        "test-kubernetes",
        "test-transformers4",
        "test-install",
        "test-dashboard",
        "test-vllm",
    ]


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    return set(output.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_by("import rolloutmq, rolloutmq.launch.cli")
    assert not {"torch", "zmq", "numpy", "aiohttp", "pydantic"} & loaded
    assert not [name for name in loaded if name.startswith("rolloutmq.services.")]


@pytest.mark.parametrize(
    "service",
    [
        "broker.server",
        "monitor.live.top",
        "orchestrator.server",
        "telemetry.server",
        "worker.runtime",
    ],
)
def test_services_load_no_torch(service: str) -> None:
    loaded = loaded_by(f"import rolloutmq.services.{service}")
    assert not {"torch", "transformers", "rolloutmq.trainer"} & loaded


def test_tests_that_pages_name_exist() -> None:
    named = [
        (page.name, *name)
        for page in [*(ROOT / "docs").glob("**/*.md"), ROOT / "README.md"]
        for name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    ]
    assert named
    for page, file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{page} names {file}::{test}"


def test_every_area_of_the_audit_has_a_row_with_its_tests() -> None:
    table = re.findall(r"^\| (.+) \|$", (ROOT / "docs" / "hardening.md").read_text(), re.MULTILINE)
    head, *rows = (line.split(" | ") for line in table)
    assert head == ["Area", "What was claimed", "What is true", "What guards it here", "Shown by"]
    assert len(rows) == 8
    for row in rows:
        assert len(row) == len(head), row[0]
        assert all(cell.strip() for cell in row), row[0]
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", row[-1]), f"{row[0]} names no test"


def test_every_promise_names_tests_that_exist() -> None:
    promises = tomllib.loads((ROOT / "benchmarks" / "promises.toml").read_text())["promise"]
    for named in [name for promise in promises for name in promise.get("tests", ())]:
        path, _, test = named.partition("::")
        assert (ROOT / path).exists(), named
        function = test.partition("[")[0].rpartition("::")[2]
        assert not function or f"def {function}(" in (ROOT / path).read_text(), named


UNQUOTED = re.compile(r"rolloutmq [^`\n]*\{(?!shell_word\()[^}]*(?:root|run_dir|path)\b[^}]*\}")


@pytest.mark.parametrize("floor", FLOORS)
def test_directories_in_commands_that_people_copy_are_quoted(floor: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in sorted((ROOT / floor).rglob("*.py"))
        for match in UNQUOTED.finditer(path.read_text("utf-8"))
    ]
    assert found == []
