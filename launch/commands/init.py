"""`rolloutmq init`: create a runnable project with an environment, its configuration and its test, and a trainer if
asked to.

The project works in any directory and with an installed package. Existing files are never overwritten: if one is in
the way, nothing is written.
"""

import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from rolloutmq.schemas.errors import ConfigError

FILES: Final = ("environment.py", "config.toml", "test_environment.py", "pytest.ini", "README.md")
TRAINER_FILES: Final = ("trainer.py", "test_trainer.py")
"""Further files of a project with a trainer."""
_FOR_TRAINER: Final = {"config.toml": "config-trainer.toml", "README.md": "README-trainer.md"}
"""Templates that differ in a project with a trainer."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")
"""Narrower than the environment names a run allows: the name is a bare TOML key here, and worker names are longer."""

_TAKEN: Final = {"None", "True", "False", "Completion", "SingleTurn", "ScriptedPolicy"}
"""Names the templates and Python already use."""


def write_project(directory: Path, name: str, *, trainer: bool = False) -> list[Path]:
    """Write the files of a new project and return their paths.

    Args:
        directory: Created if missing.
        name: Name of the environment.
        trainer: Write a trainer and its test, too, and a configuration for them.

    Raises:
        ConfigError: The name is invalid, or a file exists; nothing was written.
    """
    if not _NAME.fullmatch(name):
        allowed = "use a letter, then at most 47 letters, digits, `_` or `-`"
        raise ConfigError("--name", f"invalid environment name (got `{name}`); {allowed}")
    names = {file: _FOR_TRAINER.get(file, file) if trainer else file for file in FILES}
    names |= {file: file for file in TRAINER_FILES if trainer}
    paths = [directory / file for file in names]
    for path in paths:
        if path.exists():
            raise ConfigError(str(path), "already exists; nothing was written")
    words = {"name": name, "title": class_name(name)}
    templates = files("rolloutmq.launch") / "templates"
    texts = [
        Template((templates / f"{template}.tmpl").read_text("utf-8")).substitute(words)
        for template in names.values()
    ]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(directory), f"cannot be created: {error.strerror}") from None
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def class_name(name: str) -> str:
    """Return the name of the environment's class: `my-task` makes `MyTask`."""
    title = "".join(part[0].upper() + part[1:] for part in re.split(r"[_-]+", name) if part)
    return f"{title}Task" if title in _TAKEN else title
