"""The page in one HTML file, with the data of a run: it opens without a server, and asks nothing of any.

The modules become one script, each a function that returns its exports, in the order of their imports. A policy in the
file allows this script and these styles by their hashes and nothing else, so text of the run that is markup would do
nothing even as markup. It cannot become any: no `<` of the data is written as such.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parent
MAIN: Final = "script/main.js"
CHARTS: Final = "vendor/uPlot.iife.min.js"
_IMPORT: Final = re.compile(r'^import \{ ([\w, ]+) \} from "(\.{1,2}/[\w./]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?(?:const|function|class)) (\w+)", re.MULTILINE)
_LINKED: Final = re.compile(r'<link rel="stylesheet" href="/static/([\w./]+)">\n')
_LOADED: Final = re.compile(r'<(?:link rel="icon"|script)[^>]*>(?:</script>)?\n')
_CLOSING: Final = re.compile(r"</(?:script|style)|<!--", re.IGNORECASE)


def single_file(data: bytes) -> bytes:
    """Return the page as one HTML file.

    Args:
        data: The data of a run as JSON, see `report`.
    """
    index = (PAGE / "index.html").read_text("utf-8")
    style = _inlined(_read(name) for name in _LINKED.findall(index))
    script = _inlined([_read(CHARTS), *_modules()])
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none';"
        " form-action 'none'"
    )
    bare = _LOADED.sub("", _LINKED.sub("", index))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n</head>'
    before, after = bare.replace("</head>", head).split("</body>")
    # Valid JSON has `<` in strings only, where this escape means the same.
    quoted = data.replace(b"<", b"\\u003c")
    return b"".join(
        (
            before.encode(),
            b'<script type="application/json" id="run-data">',
            quoted,
            b"</script>\n<script>",
            script.encode(),
            b"</script>\n</body>",
            after.encode(),
        )
    )


def _modules() -> Iterable[str]:
    """Yield the modules as statements of one script, each after those that it imports."""
    yield '"use strict";\n{\nconst modules = {};\n'
    done: list[str] = []
    _add(MAIN, done, ())
    for name in done:
        yield _wrapped(name, _read(name))
    yield "}\n"


def _add(name: str, done: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules import each other in a circle: {' -> '.join((*above, name))}")
    for _, path in _IMPORT.findall(_read(name)):
        _add(_place(name, path), done, (*above, name))
    if name not in done:
        done.append(name)


def _place(name: str, path: str) -> str:
    """Return a module named by another one as a path below the page."""
    return (PAGE / name).parent.joinpath(path).resolve().relative_to(PAGE.resolve()).as_posix()


def _wrapped(name: str, source: str) -> str:
    def imported(found: "re.Match[str]") -> str:
        return f'const {{ {found[1]} }} = modules["{_place(name, found[2])}"];\n'

    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(imported, source))
    if left := re.search(r"^(?:import|export)\b.*", body, re.MULTILINE):
        raise ValueError(f"{name}: write {left[0]!r} in one line, with names in braces or a declaration")
    exports = ", ".join(exported for _, exported in _EXPORT.findall(source))
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n'


def _read(name: str) -> str:
    return (PAGE / name).read_text("utf-8")


def _inlined(parts: Iterable[str]) -> str:
    text = "\n".join(parts)
    if found := _CLOSING.search(text):
        raise ValueError(f"{found[0]!r} would end the element that holds the page's own source")
    return text


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
