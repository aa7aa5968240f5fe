"""CLI reference: every command with its arguments and options, from Typer's declarations."""

from collections.abc import Iterator
from typing import Any, Final

import typer

from rolloutmq.launch.cli import app

HEAD: Final = """\
# CLI reference

`rolloutmq --help` and `rolloutmq COMMAND --help` print the same texts. [Exit codes](exit-codes.md) has the codes.
`rolloutmq --install-completion` sets up completion of bash, zsh or fish.

`make reference` writes this page from the declarations in `launch/cli.py`."""
HIDDEN: Final = frozenset({"help"})


def page() -> str:
    """Return the page as Markdown."""
    root = typer.main.get_command(app)
    return "\n\n".join([HEAD, *_commands(root, "rolloutmq")]) + "\n"


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        called = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, called)
        else:
            yield _command(command, called)


def _command(command: Any, called: str) -> str:
    """Return the section of one command: what it does, its synopsis, a row for each parameter."""
    params = [
        param for param in command.params if param.name not in HIDDEN and not getattr(param, "hidden", False)
    ]
    arguments = [param for param in params if _is_argument(param)]
    options = [param for param in params if not _is_argument(param)]
    synopsis = " ".join([called, *map(_placeholder, arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"## `{called}`", _paragraphs(command.help or ""), f"```sh\n{synopsis}\n```"]
    if params:
        parts.append("\n".join(["| parameter | default | meaning |", "|---|---|---|", *map(_row, params)]))
    return "\n\n".join(part for part in parts if part)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _is_argument(param: Any) -> bool:
    return not param.opts[0].startswith("-")


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _placeholder(argument: Any) -> str:
    return _name(argument) if argument.required else f"[{_name(argument)}]"


def _row(param: Any) -> str:
    if _is_argument(param):
        name = f"`{_name(param)}`"
    else:
        value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
        name = ", ".join(f"`{opt}{value}`" for opt in [*param.opts, *param.secondary_opts])
    return f"| {name} | {_default(param)} | {' '.join((param.help or '').split())} |"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.default in (None, False, "", (), []) or callable(param.default):
        return ""
    return f"`{param.default}`"
