"""Commands that change a running run: its workers, its settings and its GPUs."""

from typing import Annotated, Final

import typer

from rolloutmq.launch.declarations import completion
from rolloutmq.launch.declarations.options import Json, RunOption, Worker, answered, to_change
from rolloutmq.launch.declarations.remote import Connect, Key, mirrored

STEER: Final = "Steer"

app = typer.Typer()

Gpu = Annotated[
    str,
    typer.Argument(
        help="GPU UUID or id of a Ray node, or an unambiguous prefix; or the host of a node.",
        show_default=False,
    ),
]


@app.command(rich_help_panel=STEER)
def drain(
    worker: Worker,
    run_dir: RunOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Drain a worker: it finishes its running rollouts, then exits."""
    from rolloutmq.launch.commands import steer

    where = mirrored(connect, key, run_dir, asks="Drain") or to_change(run_dir)
    raise typer.Exit(answered(lambda: steer.drain(where, worker), as_json=as_json))


@app.command(rich_help_panel=STEER)
def restart(
    worker: Annotated[
        str,
        typer.Argument(
            help="Worker, for example sort3-0, or engine, for example inference-1.",
            autocompletion=completion.workers,
        ),
    ],
    now: Annotated[bool, typer.Option("--now", help="Kill it, instead of draining it.")] = False,
    run_dir: RunOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """End a worker or an engine, and start another in its place; also a worker that was given up."""
    from rolloutmq.launch.commands import steer

    where = mirrored(connect, key, run_dir, asks="RestartWorker") or to_change(run_dir)
    raise typer.Exit(answered(lambda: steer.restart(where, worker, at_once=now), as_json=as_json))


@app.command(rich_help_panel=STEER)
def scale(
    env: Annotated[
        str,
        typer.Argument(
            help="Environment, or `inference` for the inference servers.",
            autocompletion=completion.environments,
        ),
    ],
    count: Annotated[str, typer.Argument(help="Number of workers or servers, or `auto`.")],
    run_dir: RunOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Pin an environment's worker count, or return it to autoscaling with `auto`."""
    from rolloutmq.launch.commands import steer

    if count != "auto" and not count.isdecimal():
        raise typer.BadParameter("must be a number or `auto`", param_hint="count")
    wanted = None if count == "auto" else int(count)
    where = mirrored(connect, key, run_dir, asks="SetWorkers") or to_change(run_dir)
    raise typer.Exit(answered(lambda: steer.scale(where, env, wanted), as_json=as_json))


@app.command("set", rich_help_panel=STEER)
def set_values(
    values: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings, for example env.math.weight=2.")
    ],
    run_dir: RunOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Change settings of a running run atomically; changes survive a broker restart."""
    from rolloutmq.launch.commands import steer

    where = mirrored(connect, key, run_dir, asks="SetValues") or to_change(run_dir)
    raise typer.Exit(answered(lambda: steer.set_values(where, values), as_json=as_json))


@app.command(rich_help_panel=STEER)
def cordon(
    gpu: Gpu,
    reason: Annotated[str, typer.Option(help="Reason, shown by `status` and `top`.")] = "asked",
    run_dir: RunOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Keep new workers off a GPU, whose workers stay; or off a Ray node, whose workers drain."""
    from rolloutmq.launch.commands import gpus

    where = mirrored(connect, key, run_dir, asks="CordonGpu") or to_change(run_dir)
    raise typer.Exit(answered(lambda: gpus.cordon(where, gpu, reason), as_json=as_json))


@app.command(rich_help_panel=STEER)
def uncordon(
    gpu: Gpu,
    run_dir: RunOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Allow new workers on a cordoned GPU or node. The event that caused a GPU's cordon is ignored from now on."""
    from rolloutmq.launch.commands import gpus

    where = mirrored(connect, key, run_dir, asks="UncordonGpu") or to_change(run_dir)
    raise typer.Exit(answered(lambda: gpus.uncordon(where, gpu), as_json=as_json))
