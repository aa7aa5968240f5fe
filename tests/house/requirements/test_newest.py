"""`make newest` finds the newest release, and says what it did."""

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.house.requirements import newest
from tests.house.requirements.newest import (
    ADAPTERS,
    Newest,
    difference,
    interpreter_variable,
    newest_in,
    pinned,
)

ROOT = Path(__file__).parents[3]
PYTHON = Version("3.11.7")


def file(version: str, python: str = ">=3.8", end: str = "-py3-none-any.whl", **more: Any) -> dict[str, Any]:
    return {"filename": f"some-{version}{end}", "requires-python": python, **more}


def test_the_newest_is_a_release_that_was_not_withdrawn() -> None:
    files = [
        file("1.2"),
        file("1.10"),
        file("1.9", end=".tar.gz"),
        file("2.0rc1"),
        file("1.11", yanked="broken"),
    ]
    files += [{"filename": "some-9.exe"}]
    assert newest_in(files, PYTHON) == Newest(Version("1.10"), Version("1.10"), ">=3.8")


@pytest.mark.parametrize(
    ("known", "python", "said"),
    [
        ("1.1", ">=3.8", ""),
        ("1.0", ">=3.8", "newest 1.1"),
        ("1.0", ">=3.12", "newest 1.1 needs Python >=3.12"),
        ("0.9", ">=3.12", "newest 1.1 needs Python >=3.12; newest for this Python 1.0"),
    ],
)
def test_what_is_newer_is_said(known: str, python: str, said: str) -> None:
    assert difference(Version(known), newest_in([file("1.0"), file("1.1", python)], PYTHON)) == said


def test_a_package_without_releases_is_no_news() -> None:
    assert difference(Version("1.0"), newest_in([], PYTHON)) == ""


def test_it_reports_and_fails_for_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"trl": newest_in([{"filename": "trl-99.0.tar.gz"}], PYTHON), "skyrl": Newest(None, None)}
    monkeypatch.setattr(newest, "ask", found.__getitem__)
    monkeypatch.setattr(newest, "run", lambda name, _: f"{name}: 3 failed")
    assert newest.main(["trl", "skyrl"]) == 0
    said = capsys.readouterr().out
    assert "newest 99.0\n  trl: 3 failed\n" in said
    assert "skyrl: tested" in said
    assert said.endswith("it is the newest\n")


def test_an_index_that_does_not_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(_: str) -> Newest:
        raise OSError("no route")

    monkeypatch.setattr(newest, "ask", silent)
    assert newest.main([]) == 0
    assert capsys.readouterr().out.count("the index does not answer: no route") == len(ADAPTERS)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert newest.main(["torch"]) == 2
    assert "unknown adapter: torch; use trl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_tests_of_an_adapter_take_its_interpreter(name: str) -> None:
    (folder,) = ADAPTERS[name].tests
    support = (ROOT / folder / "support.py").read_text()
    assert ADAPTERS[name].inside or f'"{interpreter_variable(name)}"' in support
    assert pinned(name, ADAPTERS[name].framework)


def test_the_tested_versions_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    tested = {name: (adapter.framework, adapter.guide or name) for name, adapter in ADAPTERS.items()}
    tested["verifiers"] = ("verifiers", "verifiers")  # of the interface before, which has no newer release
    for name, (framework, guide) in tested.items():
        version = re.escape(str(pinned(name, framework)))
        row = rf"^\| \[.*\]\(guides/{guide}\.md(#[\w-]+)?\) \| {version}[ ,;]"
        assert re.search(row, page, re.MULTILINE), name
