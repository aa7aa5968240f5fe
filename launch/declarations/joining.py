"""Parameters of programs that join a run of another host, and the command of an engine, which has no other form."""

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from rolloutmq.launch.declarations import completion
from rolloutmq.launch.declarations.remote import Connect, Key, connection

JOINED = "One process of a run"
app = typer.Typer()
T = TypeVar("T")

DirectoryHere = Annotated[
    Path | None,
    typer.Option(
        *("--run-dir", "-r"),
        help="Run directory; with --connect the directory of this host for the run.",
        autocompletion=completion.runs,
        show_default=False,
    ),
]
NameHere = Annotated[
    str, typer.Option("--name", help="Name for this host.  [default: its host name]", show_default=False)
]
Grace = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="With --connect: time to end in order after SIGTERM.", min=0.0),
]
ProbeDirectory = Annotated[
    Path | None,
    typer.Option(
        "--probe-dir",
        metavar="DIR",
        help="Directory for the files of probes: `live` and `ready`, touched every second while it holds.",
        show_default=False,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="With --connect: directory of the model on this host, if the run has one by path.",
        show_default=False,
        metavar="DIR",
    ),
]


@app.command("engine", rich_help_panel=JOINED)
def join_engine(
    connect: Connect = None,
    key: Key = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind, 0 for any free one.", min=0, max=65535)] = 0,
    advertise: Annotated[
        str, typer.Option(help="Host by which others reach it.  [default: the bound one]", show_default=False)
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Without --key: allow an address within reach of other machines, for everybody.",
        ),
    ] = False,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate (PEM) of the engine, for TLS.", metavar="FILE", show_default=False),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(help="Private key (PEM) of --tls-cert.", metavar="FILE", show_default=False),
    ] = None,
    model: Model = None,
    name: NameHere = "",
    run_dir: DirectoryHere = None,
    grace: Grace = 25.0,
    probe_dir: ProbeDirectory = None,
) -> None:
    """Serve the policy of a run of another host."""
    from rolloutmq.launch.commands.remote import programs
    from rolloutmq.launch.commands.remote.served import Served

    joined = connection(required(connect, "--connect"), key, "EngineBeat")
    way = programs.Way(joined, run_dir, grace, name, probe_dir)
    raise typer.Exit(
        programs.join_engine(
            Served(host, port, advertise, insecure, key is not None, tls_cert, tls_key), model, way
        )
    )


def required(value: T | None, name: str) -> T:
    """Return the value of a parameter. BadParameter: it is missing."""
    if not value:
        raise typer.BadParameter("is required", param_hint=name)
    return value
