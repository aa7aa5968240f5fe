"""Parameters that commands share, and the run that a command means.

Every command takes its run by `--run-dir`, short `-r`. A command without other arguments also takes it as its argument.
Without a name, a command that reads takes the only active run below `runs/`, else the newest; a command that changes a
run takes the only active one.
"""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from enum import StrEnum
from io import StringIO
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from rolloutmq.launch.declarations import completion

READS = "Run directory. Default: the only active run under runs/, else the newest."
CHANGES = "Run directory. Default: the only active run under runs/."
NAMES = ("--run-dir", "-r")

ReadArgument = Annotated[Path | None, typer.Argument(help=READS, autocompletion=completion.runs)]
ReadOption = Annotated[
    Path | None, typer.Option(*NAMES, metavar="RUN_DIR", help=READS, autocompletion=completion.runs)
]
RunArgument = Annotated[Path | None, typer.Argument(help=CHANGES, autocompletion=completion.runs)]
RunOption = Annotated[
    Path | None, typer.Option(*NAMES, metavar="RUN_DIR", help=CHANGES, autocompletion=completion.runs)
]
GroupId = Annotated[
    str, typer.Argument(help="Group id.", show_default=False, autocompletion=completion.groups)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Worker = Annotated[
    str, typer.Argument(help="Worker name, for example sort3-0.", autocompletion=completion.workers)
]


class Cluster(StrEnum):
    """Where `up` runs the workers; as `cluster.engine`."""

    LOCAL = "local"
    RAY = "ray"


class ProfileBy(StrEnum):
    """Parts of a run by which `profile` sums; as `services.monitor.profile.latencies.By`, which imports numpy."""

    ENV = "env"
    WORKER = "worker"
    HOST = "host"
    ENGINE = "engine"
    GPU = "gpu"
    ROUTE = "route"


def named(argument: Path | None, option: Path | None) -> Path | None:
    """Return the run that was named, either way.

    Raises:
        BadParameter: Two different runs were named.
    """
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(
            f"names another run (got {option}) than the argument ({argument}); name one", param_hint=NAMES[0]
        )
    return option if argument is None else argument


def to_read(option: Path | None, argument: Path | None = None) -> Path:
    """Return the run that a command reads.

    Raises:
        MissingError: There is no such run, or several are active and none was named.
    """
    from rolloutmq.launch.rundir import find_run

    return find_run(named(argument, option), living=False)


def to_change(option: Path | None, argument: Path | None = None) -> Path:
    """Return the run that a command changes.

    Raises:
        MissingError: There is no such run, it has ended, or several are active and none was named.
    """
    from rolloutmq.launch.rundir import find_run, require_active

    return require_active(find_run(named(argument, option)))


def to_prove(option: Path | None) -> Path:
    """Return the run whose shared weights a command verifies.

    Raises:
        MissingError: As for `to_change`.
    """
    from rolloutmq.launch.rundir import find_run, require_active

    return require_active(find_run(option), nothing="it shares no weights")


def answered(order: Callable[[], int], *, as_json: bool) -> int:
    """Give an order and return its exit code; as JSON, print one object: `code`, and the lines it printed as `text`.

    Errors go to standard error as text, as those of any other command.
    """
    if not as_json:
        return order()
    text = StringIO()
    with redirect_stdout(text):
        code = order()
    sys.stdout.write(dumps({"code": code, "text": text.getvalue().splitlines()}) + "\n")
    return code
