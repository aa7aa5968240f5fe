"""Commands that run one process of a run; the launcher and the orchestrator call them."""

from pathlib import Path
from typing import Annotated, Final

import typer

SERVICE: Final = "One process of a run"
app = typer.Typer()

Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a configuration key.")
]
RunDirOption = Annotated[Path, typer.Option("--run-dir", help="Run directory.")]


@app.command(rich_help_panel=SERVICE)
def broker(
    run_dir: RunDirOption,
    config: Annotated[Path | None, typer.Option(help="Run configuration, if the run has none yet.")] = None,
    assignments: Assignments = None,
) -> None:
    """Run the broker."""
    from rolloutmq.launch.settings import prepare_service
    from rolloutmq.services.broker.server import main as run

    prepare_service(run_dir, config, assignments or [])
    raise typer.Exit(run(run_dir))


@app.command(rich_help_panel=SERVICE)
def orchestrator(run_dir: RunDirOption) -> None:
    """Run the orchestrator."""
    from rolloutmq.services.orchestrator.server import main as run

    raise typer.Exit(run(run_dir))


@app.command(rich_help_panel=SERVICE)
def telemetry(run_dir: RunDirOption) -> None:
    """Run telemetry: sample the machine and record bus events."""
    from rolloutmq.services.telemetry.server import main as run

    raise typer.Exit(run(run_dir))


@app.command(rich_help_panel=SERVICE)
def inference(
    run_dir: RunDirOption,
    engine: Annotated[str, typer.Option(help="Engine name: inference, inference-1, ...")] = "inference",
) -> None:
    """Run an inference server."""
    from rolloutmq.bus.rundir import load_run

    if load_run(run_dir)[0].inference.kind == "vllm":
        from rolloutmq.services.inference.vllm.server import main as run
    else:
        from rolloutmq.services.inference.tiny.server import main as run

    raise typer.Exit(run(run_dir, engine))


@app.command(rich_help_panel=SERVICE)
def teacher(run_dir: RunDirOption) -> None:
    """Run the teacher of a distillation run."""
    from rolloutmq.services.inference.teacher.server import main as run

    raise typer.Exit(run(run_dir))


@app.command(rich_help_panel=SERVICE)
def worker(
    run_dir: RunDirOption,
    name: Annotated[str, typer.Option("--worker", help="Worker name: ENVIRONMENT-NUMBER.")],
) -> None:
    """Run an environment worker."""
    from rolloutmq.services.worker.runtime import main as run

    raise typer.Exit(run(run_dir, name))


@app.command("serve-gateway", rich_help_panel=SERVICE, hidden=True)
def gateway_service(run_dir: RunDirOption) -> None:
    """Run the HTTP gateway of a run."""
    from rolloutmq.services.gateway.server import main as run

    raise typer.Exit(run(run_dir))


@app.command(rich_help_panel=SERVICE)
def trainer(
    run_dir: RunDirOption,
    rank: Annotated[int, typer.Option(help="Rank, from 0 to trainer.ranks - 1.", min=0)] = 0,
) -> None:
    """Run one rank of the trainer."""
    from rolloutmq.trainer.loop import main as run

    raise typer.Exit(run(run_dir, rank))
