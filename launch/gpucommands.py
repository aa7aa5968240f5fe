"""The commands about GPUs, as `cli` shows them."""

from pathlib import Path
from typing import Annotated, Final

import typer

PANEL: Final = "Steer"

app = typer.Typer()

Gpu = Annotated[str, typer.Argument(help="UUID of the GPU, or how it begins.", show_default=False)]
RunOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Run directory; the one living run below runs/ if left out."),
]


@app.command(rich_help_panel=PANEL)
def cordon(
    gpu: Gpu,
    reason: Annotated[str, typer.Option(help="Why, for those who see it.")] = "asked",
    run_dir: RunOption = None,
) -> None:
    """Put no new workers on a GPU; those that are on it stay."""
    from rolloutmq.launch import gpus
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(gpus.cordon(find_run(run_dir), gpu, reason))


@app.command(rich_help_panel=PANEL)
def uncordon(gpu: Gpu, run_dir: RunOption = None) -> None:
    """Use a GPU again, whatever it was cordoned for; the same event does not cordon it a second time."""
    from rolloutmq.launch import gpus
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(gpus.uncordon(find_run(run_dir), gpu))
