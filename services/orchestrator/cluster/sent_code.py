"""What of the configuration's directory is not sent to the hosts along with the code: runs, keys and secrets."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout

SKIPPED: Final = re.compile(r"runs|\.git|\.venv.*|__pycache__")
"""Directories that are never sent, and so not searched either."""
_SPECIAL: Final = re.compile(r"([\\*?\[\]!# ])")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f]")


def excluded(config: RunConfig, layout: RunLayout) -> list[str]:
    """Return what is not sent, as lines of a `.gitignore` in the directory: runs, their keys, secrets. Blocks."""
    base = config.base_dir.resolve()
    secret = [Path(config.broker.keys)] if config.broker.keys else []
    secret += [path for path in (config.run.http_token_file, config.run.tls_key) if path is not None]
    # A link is left out under its own name, and its target under its name, too.
    named = [Path(os.path.abspath(base / path)) for path in secret]  # noqa: PTH100 - it keeps links
    runs = (layout.root.resolve(), *_runs_in(base))
    places = dict.fromkeys([*runs, *named, *(path.resolve() for path in named)])
    return [_line(path.relative_to(base)) for path in places if path != base and path.is_relative_to(base)]


def _runs_in(base: Path) -> Iterator[Path]:
    """Yield the run directories below a directory: they have keys, logs and checkpoints."""
    for place, directories, _ in os.walk(base):
        layout = RunLayout(Path(place))
        if layout.config.exists() and (layout.logs.is_dir() or layout.owner.exists()):
            directories.clear()
            yield layout.root
        directories[:] = [name for name in directories if not SKIPPED.fullmatch(name)]


def _line(path: Path) -> str:
    """Return the line that means this path alone, whatever characters it has."""
    return "/" + _UNPRINTABLE.sub("?", _SPECIAL.sub(r"\\\1", path.as_posix()))
