"""`rolloutmq init`: an environment of one's own, its configuration and its test, ready to run.

What is written works as it stands, in any directory and from an installed package. Nothing is ever overwritten: either
every file is new, or none is written.
"""

import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from rolloutmq.schemas.errors import ConfigError

FILES: Final = ("environment.py", "config.toml", "test_environment.py", "README.md")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")
"""Narrower than the name of an environment may be: it is a bare key of TOML here, and worker names are longer."""

_TAKEN: Final = {"None", "True", "False", "Completion", "SingleTurn", "ScriptedPolicy"}
"""What the templates and the language mean by a name already."""


def write_project(directory: Path, name: str) -> list[Path]:
    """Write the files of a new project and return their paths.

    Args:
        directory: Made if it is not there.
        name: Name of the environment.

    Raises:
        ConfigError: The name cannot be one, or a file is there already; nothing was written.
    """
    if not _NAME.fullmatch(name):
        allowed = "a letter, then at most 47 letters, digits, `_` or `-`"
        raise ConfigError("--name", f"`{name}` cannot name an environment: {allowed}")
    paths = [directory / file for file in FILES]
    for path in paths:
        if path.exists():
            raise ConfigError(str(path), "is there already, nothing was written")
    words = {"name": name, "title": class_name(name)}
    templates = files("rolloutmq.launch") / "templates"
    texts = [Template((templates / f"{file}.tmpl").read_text("utf-8")).substitute(words) for file in FILES]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(directory), f"cannot be made: {error.strerror}") from None
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def class_name(name: str) -> str:
    """Return the name of the environment's class: `my-task` makes `MyTask`."""
    title = "".join(part[0].upper() + part[1:] for part in re.split(r"[_-]+", name) if part)
    return f"{title}Task" if title in _TAKEN else title
