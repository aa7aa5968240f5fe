"""Commands that run one process of a run, for people; the launcher starts them by `service_process`."""

from pathlib import Path
from typing import Annotated, Final

import typer

from rolloutmq.launch import service_process
from rolloutmq.launch.declarations import completion

SERVICE: Final = "One process of a run"
app = typer.Typer()

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
    run_dir: RunDirOption,
    name: Annotated[str, typer.Option("--worker", help="Worker name: ENVIRONMENT-NUMBER.")],
) -> None:
    """Run an environment worker."""
    raise typer.Exit(service_process.worker(run_dir, name))


@app.command(rich_help_panel=SERVICE)
def relay(
    run_dir: RunDirOption,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Run directory to get the weights from; by default this run's trainer writes them."
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="Address to serve the weights at: tcp://HOST:PORT.")] = "",
) -> None:
    """Run a relay: serve the weights of a run to relays of other hosts, or receive them from one."""
    raise typer.Exit(service_process.relay(run_dir, source, listen))


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
    run_dir: RunDirOption,
    rank: Annotated[int, typer.Option(help="Rank, from 0 to trainer.ranks - 1.", min=0)] = 0,
) -> None:
    """Run one rank of the trainer."""
    raise typer.Exit(service_process.trainer(run_dir, rank))
