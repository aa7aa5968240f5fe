"""The workflows: what they need is in place, and a release is published only after it was tried."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.house.distribution.checkout import ROOT

FOLDER = ROOT / ".github" / "workflows"


def workflow(name: str) -> dict[str, Any]:
    """Return a workflow as GitHub reads it: YAML 1.2, where the key `on` is no truth value."""
    read: dict[str, Any] = yaml.load((FOLDER / name).read_text(), yaml.BaseLoader)
    return read


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def declared_pythons() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: str(file.name))
def test_each_job_has_few_rights_and_a_time_limit(file: Path) -> None:
    read = workflow(file.name)
    assert read.keys() >= {"name", "on", "permissions", "jobs"}
    assert read["permissions"] == {"contents": "read"}
    for name, job in read["jobs"].items():
        assert job["runs-on"].startswith("ubuntu-"), name
        assert int(job["timeout-minutes"]) <= 90, name
        assert job["steps"], name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"[\w-]+/[\w-]+@\S+", step.get("uses", "a/b@c")), step


def test_files_and_targets_that_the_workflows_name_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    test = workflow("ci.yml")["jobs"]["test"]
    assert "make ${{ matrix.target }}" in commands(test)
    assert {*test["strategy"]["matrix"]["target"], "test-install"} <= {*targets}
    jobs = workflow("release.yml")["jobs"]
    text = "\n".join(map(commands, jobs.values()))
    named = re.findall(r"(?:source/|--requirement )(\S+\.(?:py|txt))", text)
    assert named == ["requirements/build.txt", "tests/house/distribution/smoke.py"]
    assert all((ROOT / name).is_file() for name in named)


def test_a_tag_is_built_tried_on_each_python_and_published_by_identity() -> None:
    read = workflow("release.yml")
    assert read["on"] == {"push": {"tags": ["v[0-9]*"]}}
    jobs = read["jobs"]
    assert jobs.keys() == {"build", "try", "publish"}
    assert (jobs["try"]["needs"], jobs["publish"]["needs"]) == ("build", "try")
    built = commands(jobs["build"])
    assert re.search(r"-m build .*\n.*twine check --strict", built)
    (checkout, *_) = jobs["build"]["steps"]
    assert checkout["with"]["fetch-depth"] == "0"
    assert jobs["try"]["strategy"]["matrix"] == {"python": declared_pythons(), "file": ["*.whl", "*.tar.gz"]}
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1] == {"uses": "pypa/gh-action-pypi-publish@release/v1"}
    assert "secrets." not in (FOLDER / "release.yml").read_text()


def test_the_readme_of_a_release_links_to_its_tag() -> None:
    steps = workflow("release.yml")["jobs"]["build"]["steps"]
    (links,) = [step["env"]["README_LINKS"] for step in steps if "env" in step]
    assert links == "${{ github.server_url }}/${{ github.repository }}/{view}/${{ github.ref_name }}"
