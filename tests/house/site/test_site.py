"""The site: its navigation, its API page, and the program that looks for files from other hosts."""

import re
from pathlib import Path

import pytest
from tests.house.site.loads import loads, loads_of_site, loads_of_style, main

import rolloutmq.testing

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
ELSEWHERE = "https://cdn.example.com/a"


def test_every_page_is_in_the_navigation_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r"^ +- [^:]*?(?:: )?(\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    pages = [(DOCS / "reference" / name).read_text() for name in ("api.md", "errors.md")]
    documented = {line.rpartition(".")[2] for line in pages[0].splitlines() if line.startswith("::: ")}
    errors = {name for name in rolloutmq.__all__ if name.endswith("Error")}
    public = {*rolloutmq.__all__, *rolloutmq.testing.__all__}
    assert public - errors - {"__version__"} == documented
    assert not [name for name in errors if f"`{name}`" not in pages[1]]


@pytest.mark.parametrize(
    "page",
    [
        f'<script src="{ELSEWHERE}"></script>',
        f'<link rel="stylesheet" href="{ELSEWHERE}">',
        f'<link rel="preconnect" href="{ELSEWHERE}">',
        f'<img alt="" src="{ELSEWHERE}">',
        f'<p style="background: url({ELSEWHERE})">',
        f"<style>@font-face {{ src: url('{ELSEWHERE}') }}</style>",
    ],
)
def test_a_load_from_another_host_is_found(page: str) -> None:
    assert loads(page) == [ELSEWHERE]


def test_a_link_for_a_reader_is_no_load() -> None:
    assert not loads(f'<a href="{ELSEWHERE}">a</a><link rel="canonical" href="{ELSEWHERE}"><img src="a.png">')
    assert not loads_of_style("a { background: url(data:image/svg+xml;x) } /* see https://example.com */")


def test_a_site_is_searched_file_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match="make docs"):
        list(loads_of_site(tmp_path))
    (tmp_path / "index.html").write_text('<img src="a.png">')
    assert main([str(tmp_path)]) == 0
    (tmp_path / "a.css").write_text('@import "//cdn.example.com/b.css";')
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path / 'a.css'}: loads //cdn.example.com/b.css\n"
