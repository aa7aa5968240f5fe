"""Commands that run one process of a run, for people; the launcher starts them by `service_process`."""

from pathlib import Path
from typing import Annotated, Final

import typer

from rolloutmq.launch import service_process
from rolloutmq.launch.declarations import completion
from rolloutmq.launch.declarations.joining import (
    DirectoryHere,
    Grace,
    Model,
    NameHere,
    ProbeDirectory,
    required,
)
from rolloutmq.launch.declarations.joining import app as joining
from rolloutmq.launch.declarations.remote import Connect, Key, connection

SERVICE: Final = "One process of a run"
app = typer.Typer()
app.add_typer(joining)

Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a configuration key.")
]
RunDirOption = Annotated[
    Path, typer.Option("--run-dir", "-r", help="Run directory.", autocompletion=completion.runs)
]


@app.command(rich_help_panel=SERVICE)
def broker(
    run_dir: RunDirOption,
    config: Annotated[Path | None, typer.Option(help="Run configuration, if the run has none yet.")] = None,
    assignments: Assignments = None,
) -> None:
    """Run the broker."""
    from rolloutmq.launch.preflight.hub import fetched
    from rolloutmq.launch.settings import prepare_service

    prepare_service(run_dir, config, assignments or [], fetched)
    raise typer.Exit(service_process.broker(run_dir))


@app.command(rich_help_panel=SERVICE)
def orchestrator(run_dir: RunDirOption) -> None:
    """Run the orchestrator."""
    raise typer.Exit(service_process.orchestrator(run_dir))


@app.command(rich_help_panel=SERVICE)
def cluster(run_dir: RunDirOption) -> None:
    """Run the cluster service: the workers of a run on a Ray cluster."""
    raise typer.Exit(service_process.cluster(run_dir))


@app.command(rich_help_panel=SERVICE)
def telemetry(run_dir: RunDirOption) -> None:
    """Run telemetry: sample the machine and record bus events."""
    raise typer.Exit(service_process.telemetry(run_dir))


@app.command(rich_help_panel=SERVICE)
def inference(
    run_dir: RunDirOption,
    engine: Annotated[str, typer.Option(help="Engine name: inference, inference-1, ...")] = "inference",
) -> None:
    """Run an inference server."""
    raise typer.Exit(service_process.inference(run_dir, engine))


@app.command(rich_help_panel=SERVICE)
def teacher(run_dir: RunDirOption) -> None:
    """Run the teacher of a distillation run."""
    raise typer.Exit(service_process.teacher(run_dir))


@app.command(rich_help_panel=SERVICE)
def curriculum(run_dir: RunDirOption) -> None:
    """Run the curriculum: choose the tasks of each environment with a section `curriculum.NAME`."""
    raise typer.Exit(service_process.curriculum(run_dir))


@app.command(rich_help_panel=SERVICE)
def worker(
    env: Annotated[
        str,
        typer.Argument(help="Environment of a run of another host, with --connect.", show_default=False),
    ] = "",
    run_dir: DirectoryHere = None,
    worker: Annotated[
        str, typer.Option("--worker", help="Worker name: ENVIRONMENT-NUMBER.", show_default=False)
    ] = "",
    connect: Connect = None,
    key: Key = None,
    code: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the environment's code and data on this host; nothing outside is loaded.",
            show_default=False,
            metavar="DIR",
        ),
    ] = None,
    allow_module: Annotated[
        list[str] | None,
        typer.Option(
            help="Installed module or package that the run may name; repeatable.", show_default=False
        ),
    ] = None,
    allow_variable: Annotated[
        list[str] | None,
        typer.Option(
            help="Variable of this host that options may refer to (env:NAME); repeatable.", show_default=False
        ),
    ] = None,
    name: NameHere = "",
    count: Annotated[int, typer.Option(help="Number of workers.", min=1, max=1024)] = 1,
    grace: Grace = 25.0,
    probe_dir: ProbeDirectory = None,
) -> None:
    """Run an environment worker: of a run directory, or with --connect of a run of another host."""
    _require_joining(connect, probe_dir)
    if not connect:
        found = required(run_dir, "--run-dir"), required(worker, "--worker")
        raise typer.Exit(service_process.worker(*found))
    if worker:
        raise typer.BadParameter("is for a run directory; name the environment", param_hint="--worker")
    from rolloutmq.launch.commands.remote import programs
    from rolloutmq.launch.commands.remote.own_code import OwnCode

    own = OwnCode.of(required(code, "--code"), allow_module or (), allow_variable or ())
    way = programs.Way(connection(connect, key, "RegisterProducer"), run_dir, grace, name, probe_dir)
    raise typer.Exit(programs.join_workers(required(env, "ENV"), count, own, way))


@app.command(rich_help_panel=SERVICE)
def relay(
    run_dir: DirectoryHere = None,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Run directory to get the weights from; by default this run's trainer writes them."
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="Address to serve the weights at: tcp://HOST:PORT.")] = "",
    connect: Connect = None,
    key: Key = None,
    behind: Annotated[
        str,
        typer.Option(
            help="With --connect: relay of a third host that sends the weights, relay.NAME.  [default: the run's]",
            show_default=False,
            metavar="RELAY",
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            help="With --listen: host by which other relays reach it.  [default: the bound one]",
            show_default=False,
        ),
    ] = "",
    name: NameHere = "",
    grace: Grace = 25.0,
    probe_dir: ProbeDirectory = None,
) -> None:
    """Run a relay: serve the weights of a run to other hosts, or with --connect receive those of another host."""
    _require_joining(connect, probe_dir)
    if not connect:
        raise typer.Exit(service_process.relay(required(run_dir, "--run-dir"), source, listen))
    if source is not None:
        raise typer.BadParameter(
            "is for a run directory of this host; name one of both", param_hint="--source"
        )
    from rolloutmq.launch.commands.remote import programs

    way = programs.Way(connection(connect, key, "GetWeightsTicket"), run_dir, grace, name, probe_dir)
    raise typer.Exit(programs.join_relay(programs.Passing(listen, advertise, behind), way))


@app.command("serve-gateway", rich_help_panel=SERVICE, hidden=True)
def gateway_service(run_dir: RunDirOption) -> None:
    """Run the HTTP gateway of a run."""
    raise typer.Exit(service_process.gateway(run_dir))


@app.command("serve-dashboard", rich_help_panel=SERVICE, hidden=True)
def dashboard_service(run_dir: RunDirOption) -> None:
    """Run the server of the page, on the socket of its launcher."""
    raise typer.Exit(service_process.dashboard(run_dir))


@app.command(rich_help_panel=SERVICE)
def trainer(
    run_dir: DirectoryHere = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            help="Rank, from 0 to trainer.ranks - 1; repeatable with --connect.  [default: 0]", min=0
        ),
    ] = None,
    connect: Connect = None,
    key: Key = None,
    model: Model = None,
    grace: Grace = 25.0,
    probe_dir: ProbeDirectory = None,
) -> None:
    """Run one rank of the trainer; with --connect ranks of a run of another host."""
    _require_joining(connect, probe_dir)
    ranks = rank or [0]
    if connect:
        from rolloutmq.launch.commands.remote import programs

        way = programs.Way(connection(connect, key, "RegisterConsumer"), run_dir, grace, probe_dir=probe_dir)
        raise typer.Exit(programs.join_trainer(ranks, model, way))
    if len(ranks) > 1:
        raise typer.BadParameter("several ranks of one command need --connect", param_hint="--rank")
    raise typer.Exit(service_process.trainer(required(run_dir, "--run-dir"), ranks[0]))


def _require_joining(connect: list[str] | None, probe_dir: Path | None) -> None:
    """Refuse files of probes for a process of a run directory: its launcher watches it."""
    if probe_dir is not None and not connect:
        raise typer.BadParameter("needs --connect, the address of the run", param_hint="--probe-dir")
