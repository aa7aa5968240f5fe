"""Relative words per 100 words of prose, page by page, with the worst sentences: `python tests/house/prose.py`.

Code blocks, inline code, tables, comments and link targets do not count. Exit code 1 if a page is above the limit.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
LIMIT: Final = 1.5
"""Relative words per 100 words."""
WORST: Final = 5
RELATIVE: Final = re.compile(r"\b(?:that|which|who|whom|whose|what|whoever|whatever)\b", re.IGNORECASE)
WORD: Final = re.compile(r"[A-Za-z][A-Za-z'-]*")
_NOT_PROSE: Final = (
    re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^(?: {4}|\t).*$", re.MULTILINE),
    re.compile(r"^\|.*$", re.MULTILINE),
    re.compile(r"^:::.*$", re.MULTILINE),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
)


class Prose(NamedTuple):
    """How the prose of one page reads."""

    path: Path
    words: int
    relative: int
    worst: list[str]

    @property
    def ratio(self) -> float:
        """Relative words per 100 words."""
        return 100 * self.relative / max(self.words, 1)

    def line(self) -> str:
        return f"{self.ratio:5.2f}  {self.words:6} words  {self.path.relative_to(ROOT)}"


def pages() -> Iterator[Path]:
    """Yield every page."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def prose_of(text: str) -> str:
    """Return the sentences of a page in Markdown."""
    for pattern in _NOT_PROSE:
        text = pattern.sub(" ", text)
    return text


def measure(path: Path) -> Prose:
    """Count the words of a page."""
    text = prose_of(path.read_text())
    sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?:])\s|\n\s*\n|\n[-#*] ", text)]
    heavy = sorted((one for one in sentences if RELATIVE.search(one)), key=_weight, reverse=True)
    return Prose(path, len(WORD.findall(text)), len(RELATIVE.findall(text)), heavy[:WORST])


def _weight(sentence: str) -> tuple[int, float]:
    found = len(RELATIVE.findall(sentence))
    return found, found / len(sentence)


def main() -> int:
    """Print a line for each page, and the worst sentences of those above the limit."""
    measured = sorted(map(measure, pages()), key=lambda prose: prose.ratio, reverse=True)
    for prose in measured:
        sys.stdout.write(prose.line() + "\n")
        if prose.ratio > LIMIT:
            sys.stdout.writelines(f"         {sentence}\n" for sentence in prose.worst)
    return int(any(prose.ratio > LIMIT for prose in measured))


if __name__ == "__main__":
    raise SystemExit(main())
