"""The files of the page, and the one file that holds them all: nothing from elsewhere, and no markup out of text."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rolloutmq.services.dashboard.page.single_file import MAIN, PAGE, _wrapped, single_file

SCRIPTS = sorted(path.relative_to(PAGE).as_posix() for path in (PAGE / "script").rglob("*.js"))
STYLES = sorted(path.relative_to(PAGE).as_posix() for path in (PAGE / "style").rglob("*.css"))
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "([^"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:const|function|class) (\w+)", re.MULTILINE)
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\(|"
    r"new Function|setAttribute\(\"style\"|srcdoc|javascript:"
)
RELEASED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE-uPlot.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of each file of uPlot 1.6.32, as its package has them."""


def imports(name: str) -> list[tuple[str, list[str]]]:
    """Return each module that a module imports, with the names."""
    source = (PAGE / name).read_text()
    return [
        (
            (PAGE / name).parent.joinpath(path).resolve().relative_to(PAGE.resolve()).as_posix(),
            names.split(", "),
        )
        for names, path in IMPORT.findall(source)
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_module_makes_no_markup_and_asks_no_other_server(name: str) -> None:
    source = (PAGE / name).read_text()
    assert MARKUP.findall(source) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", source) == []
    assert source.startswith("// "), "a module begins with what it is"


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_import_is_exported_and_used(name: str) -> None:
    source = (PAGE / name).read_text()
    for module, names in imports(name):
        exported = EXPORT.findall((PAGE / module).read_text())
        for each in names:
            assert each in exported, f"{module} does not export {each}"
            assert len(re.findall(rf"\b{each}\b", source)) > 1, f"{each} is not used"


def test_each_module_and_each_export_has_a_use() -> None:
    todo, seen, used = [MAIN], set[str](), set[tuple[str, str]]()
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        for module, names in imports(name):
            todo.append(module)
            used |= {(module, each) for each in names}
    assert seen == set(SCRIPTS)
    exported = {(name, each) for name in SCRIPTS for each in EXPORT.findall((PAGE / name).read_text())}
    assert exported - used == set()


@pytest.mark.parametrize("name", STYLES)
def test_a_style_sheet_asks_no_other_server(name: str) -> None:
    assert re.findall(r"url\(|@import|https?:", (PAGE / name).read_text()) == []


def test_the_index_names_each_style_sheet_and_only_files_that_exist() -> None:
    named = re.findall(r'(?:href|src)="/static/([^"]+)"', (PAGE / "index.html").read_text())
    for name in named:
        assert (PAGE / name).is_file(), name
    assert set(STYLES) < set(named)


def test_the_charts_are_those_of_the_release_with_their_licence() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (PAGE / "vendor").iterdir()}
    assert found == RELEASED
    assert "MIT License" in (PAGE / "vendor" / "LICENSE-uPlot.txt").read_text()


class Elements(HTMLParser):
    """The elements of a page, and the text of each script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self._inside = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data


HOSTILE = {
    "state": {"run": {"name": "</script><script>alert(1)</script><!-- <script>", "dir": "\u2028\u2029]]>"}},
    "dead": ["<!--", "-->", "</SCRIPT >", "\\u003c/script>", "\\"],
}


def test_a_report_holds_its_data_whatever_it_is() -> None:
    page = single_file(json.dumps(HOSTILE).encode())
    elements = Elements()
    elements.feed(page.decode())
    data, script = elements.texts["script"]
    assert json.loads(data) == HOSTILE
    assert "alert(1)" not in script
    assert sum(tag == "script" for tag, _ in elements.tags) == 2


def test_a_report_allows_its_own_script_and_styles_and_nothing_else() -> None:
    elements = Elements()
    elements.feed(single_file(b"{}").decode())
    (policy,) = [a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy == (
        f"default-src 'none'; script-src {digest(elements.texts['script'][1])};"
        f" style-src {digest(elements.texts['style'][0])}; base-uri 'none'; form-action 'none'"
    )
    outside = [a for _, a in elements.tags if {"src", "srcset", "action"} & a.keys()]
    assert outside == []
    assert all((a.get("href") or "#").startswith("#") for _, a in elements.tags)


def test_a_module_that_would_not_bundle_is_an_error() -> None:
    with pytest.raises(ValueError, match="in one line"):
        _wrapped("script/main.js", 'import * as dom from "./text/dom.js";\n')
    with pytest.raises(ValueError, match="in one line"):
        _wrapped("script/main.js", "export default 1;\n")


def test_the_page_is_found_where_the_package_is() -> None:
    assert Path(PAGE, "index.html").is_file()
