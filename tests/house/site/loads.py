"""Files from other hosts that a page of the built site would load: `python tests/house/site/loads.py site`.

Scripts, styles, fonts, images and frames count; links for a reader to follow do not. Exit code 1 if there is one.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

_ELSEWHERE: Final = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_LOADED: Final = frozenset(
    {"audio", "embed", "iframe", "image", "img", "input", "script", "source", "track", "video"}
)
_LINKS: Final = frozenset(
    {"icon", "manifest", "modulepreload", "preload", "prefetch", "preconnect", "stylesheet"}
)
_IN_STYLES: Final = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s;]+)")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.found += _IN_STYLES.findall(given.get("style", ""))
        if tag in _LOADED:
            self.found += filter(
                _ELSEWHERE.match, (given.get(name, "") for name in ("src", "href", "poster"))
            )
            self.found += filter(_ELSEWHERE.match, given.get("srcset", "").split(","))
        elif tag == "object":
            self.found += filter(_ELSEWHERE.match, [given.get("data", "")])
        elif tag == "link" and _LINKS & set(given.get("rel", "").lower().split()):
            self.found += filter(_ELSEWHERE.match, [given.get("href", "")])


def loads(page: str) -> list[str]:
    """Return the addresses on other hosts that a browser loads with a page."""
    parser = _Page()
    parser.feed(page)
    styles = re.findall(r"<style[^>]*>(.*?)</style>", page, re.DOTALL)
    return parser.found + [address for style in styles for address in loads_of_style(style)]


def loads_of_style(style: str) -> list[str]:
    """Return the addresses on other hosts that a style sheet loads."""
    return _IN_STYLES.findall(style)


def loads_of_site(site: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file with an address on another host.

    Raises:
        FileNotFoundError: The site has no pages.
    """
    pages = sorted(site.rglob("*.html"))
    if not pages:
        raise FileNotFoundError(f"{site} has no pages; run `make docs`")
    for page in pages:
        yield from ((page, address) for address in loads(page.read_text()))
    for style in sorted(site.rglob("*.css")):
        yield from ((style, address) for address in loads_of_style(style.read_text()))


def main(arguments: Sequence[str]) -> int:
    """Print each file with an address on another host."""
    found = list(loads_of_site(Path(arguments[0])))
    sys.stdout.writelines(f"{path}: loads {address}\n" for path, address in found)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
