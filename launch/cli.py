"""The command line. Every command imports what it needs when it runs, so that `--help` answers at once.

Exit codes: 0 done, 1 failed, 2 the configuration or the command line is wrong, 4 somebody else has the run directory,
130 interrupted.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from rolloutmq.bus.lifecycle import IN_USE
from rolloutmq.launch import gpucommands
from rolloutmq.launch.services import Assignments
from rolloutmq.launch.services import app as services
from rolloutmq.schemas.errors import ConfigError, RolloutMQError, RunDirInUseError

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2

app = typer.Typer(
    name="rolloutmq",
    help="The message bus for LLM reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RUN = "Run"
LOOK = "Look"
STEER = "Steer"

ConfigFile = Annotated[Path, typer.Argument(help="TOML file of the run.", show_default=False)]
RunDir = Annotated[
    Path | None,
    typer.Argument(help="Run directory; the one living run below runs/ if left out."),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Run directory; the one living run below runs/ if left out."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
GroupId = Annotated[str, typer.Argument(help="Id of the group.", show_default=False)]

ledger = typer.Typer(help="Check where every accepted group is.", no_args_is_help=True)
dead = typer.Typer(
    help="Look at the groups that could not be trained, or queue them again.", no_args_is_help=True
)
app.add_typer(gpucommands.app)
app.add_typer(ledger, name="ledger", rich_help_panel=LOOK)
app.add_typer(dead, name="dead", rich_help_panel=STEER)


@app.command(rich_help_panel=RUN)
def up(
    config: ConfigFile,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run directory left off.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run leaves its files.")] = None,
    assignments: Assignments = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the run has started.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Progress lines instead of the live view.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Keep every group on disk, for `rolloutmq replay`.")
    ] = False,
) -> None:
    """Start a whole run and watch it until it ends."""
    from rolloutmq.launch.settings import load

    extra = list(assignments or [])
    extra += [f"run.seed={seed}"] if seed is not None else []
    extra += [f'run.dir="{run_dir}"'] if run_dir is not None else []
    extra += ["broker.replay=true"] if replay else []
    resolved = load(config, environ=os.environ, assignments=extra)
    from rolloutmq.launch import local, steer

    if detach:
        raise typer.Exit(steer.detach(resolved, sys.argv[1:]))
    raise typer.Exit(local.up(resolved, local.UpOptions(resume=resume, plain=plain)))


@app.command(rich_help_panel=RUN)
def gateway(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Where it leaves its files, or a run that lives.")
    ] = Path("runs/gateway"),
    host: Annotated[str | None, typer.Option(help="Address to bind.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 for any.  [default: 8000]")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file.")] = None,
    assignments: Assignments = None,
    plain: Annotated[bool, typer.Option("--plain", help="Progress lines instead of the live view.")] = False,
    broker_only: Annotated[
        bool, typer.Option("--broker-only", help="Do not listen: an ASGI server of your own does.")
    ] = False,
) -> None:
    """Serve environments and trainers of Atropos, in place of `run-api`."""
    from rolloutmq.launch import gateway as serving

    more = assignments or []
    raise typer.Exit(serving.gateway(run_dir, host, port, config, more, plain=plain, broker_only=broker_only))


@app.command("run-api-alias", rich_help_panel=RUN)
def run_api_alias() -> None:
    """Install a command `run-api` that is `rolloutmq gateway`, unless there is one."""
    from rolloutmq.launch import gateway as serving

    typer.echo(f"wrote {serving.alias()}")


@app.command(rich_help_panel=RUN)
def replay(
    recorded: Annotated[Path, typer.Argument(help="Run directory of a run that was started with --replay.")],
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Run directory of the replay, for its trainers.")
    ] = Path("runs/replay"),
) -> None:
    """Serve the batches of a recorded run again, the same in the same order, until all are trained."""
    from rolloutmq.launch import replay as replaying

    raise typer.Exit(replaying.replay(recorded, run_dir))


@app.command(rich_help_panel=RUN)
def down(run_dir: RunDir = None) -> None:
    """End a run in order; what is queued is saved."""
    from rolloutmq.launch import steer
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(steer.down(find_run(run_dir)))


@app.command(rich_help_panel=RUN)
def init(
    directory: Annotated[Path, typer.Argument(help="Directory to write.")],
    name: Annotated[str | None, typer.Option(help="Name of the environment.")] = None,
) -> None:
    """Write an environment of your own, a configuration and a test of it."""
    from rolloutmq.launch.init import write_project

    for path in write_project(directory, name or directory.resolve().name):
        typer.echo(f"wrote {path}")


@app.command(rich_help_panel=RUN)
def doctor(
    run_dir: RunDir = None,
    as_json: Json = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Remove what dead processes left: shared memory, sockets, addresses."),
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Prove that the weights of a living run are one and the same.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of a run: check that too, as `up` would.")
    ] = None,
) -> None:
    """Tell what is missing on this machine and how to get it; or sweep, or prove the weights of a run."""
    if sweep:
        from rolloutmq.launch import remains

        raise typer.Exit(remains.report(run_dir))
    if weights:
        from rolloutmq.launch import weights as proofs
        from rolloutmq.launch.rundir import find_run

        raise typer.Exit(proofs.report(find_run(run_dir), as_json=as_json))
    from rolloutmq.launch import doctor as checks

    raise typer.Exit(checks.report(as_json=as_json, file=config))


@app.command(rich_help_panel=LOOK)
def status(run_dir: RunDir = None, as_json: Json = False) -> None:
    """Show the state of a run, and who waits for what."""
    from rolloutmq.launch.rundir import find_run
    from rolloutmq.services.monitor.status import status as show

    raise typer.Exit(show(find_run(run_dir), as_json))


@app.command(rich_help_panel=LOOK)
def workers(run_dir: RunDir = None, as_json: Json = False) -> None:
    """Show every worker, why one is not up, and how many there should be."""
    from rolloutmq.launch.rundir import find_run
    from rolloutmq.services.monitor.workers import workers as show

    raise typer.Exit(show(find_run(run_dir), as_json))


@app.command(rich_help_panel=LOOK)
def top(run_dir: RunDir = None) -> None:
    """Watch a run live."""
    from rolloutmq.launch.rundir import find_run
    from rolloutmq.services.monitor.top import top as watch

    raise typer.Exit(watch(find_run(run_dir)))


@app.command(rich_help_panel=LOOK)
def logs(
    name: Annotated[str, typer.Argument(help="Process, for example broker or sort3-0.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    run_dir: RunOption = None,
) -> None:
    """Print the log of one process."""
    from rolloutmq.launch.rundir import find_run
    from rolloutmq.services.monitor.logs import logs as show

    raise typer.Exit(show(find_run(run_dir, living=False), name, follow=follow))


@app.command(rich_help_panel=LOOK)
def tail(
    topic: Annotated[str, typer.Argument(help="Topic or its beginning; all if empty.")] = "",
    run_dir: RunOption = None,
) -> None:
    """Print events of the bus as JSON lines."""
    from rolloutmq.launch.rundir import find_run
    from rolloutmq.services.monitor.tail import tail as show

    raise typer.Exit(show(find_run(run_dir), topic))


@app.command(rich_help_panel=LOOK)
def explain(group_id: GroupId, run_dir: RunOption = None, as_json: Json = False) -> None:
    """Tell where a group came from, where it has been and why."""
    from rolloutmq.launch import explain
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(explain.explain(find_run(run_dir, living=False), group_id, as_json=as_json))


@ledger.command("verify")
def ledger_verify(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Run directory; the newest below runs/ if left out.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the groups themselves unread.")] = False,
    as_json: Json = False,
) -> None:
    """Recompute the ledger of a run from its files alone, and name every group that is not accounted for."""
    from rolloutmq.launch import ledger

    raise typer.Exit(ledger.verify(run_dir, as_json=as_json, quick=quick))


@dead.command("list")
def dead_list(run_dir: RunOption = None, as_json: Json = False) -> None:
    """List the dead groups."""
    from rolloutmq.launch import dead
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(dead.show_list(find_run(run_dir, living=False), as_json=as_json))


@dead.command("show")
def dead_show(group_id: GroupId, run_dir: RunOption = None) -> None:
    """Show one dead group: why it died, its history, what it holds."""
    from rolloutmq.launch import dead
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(dead.show(find_run(run_dir, living=False), group_id))


@dead.command("requeue")
def dead_requeue(
    group_ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of the groups.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead groups.")] = False,
    run_dir: RunOption = None,
) -> None:
    """Have the living broker queue dead groups again, with a clean slate."""
    from rolloutmq.launch import dead
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(dead.requeue(find_run(run_dir), group_ids or [], every=every))


@app.command(rich_help_panel=LOOK)
def report(run_dir: RunDir = None, as_json: Json = False) -> None:
    """Write summary.json and report.png of a run again; compare what it trained with what it produced."""
    from rolloutmq.launch import steer
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(steer.report(find_run(run_dir, living=False), as_json=as_json))


@app.command(rich_help_panel=LOOK)
def simulate(
    start: Annotated[
        list[float] | None, typer.Option(help="Seconds that a worker takes to start; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Trials of each law on each scenario.")] = 5,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be repeated. All if left out.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="CSV of seconds and consumed sequences per second, instead.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the first seed, for example as a .png.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Run directory or decisions.jsonl: make its decisions again instead, and compare."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare rules that scale workers, on simulated runs; or make the decisions of a run again."""
    from rolloutmq.launch import simulate as simulation

    if replay is not None:
        raise typer.Exit(simulation.decide_again(replay, as_json=as_json))
    simulation.simulate(start or [20.0], seeds, scenario or [], trace, picture=picture, as_json=as_json)


@app.command(rich_help_panel=STEER)
def drain(
    worker: Annotated[str, typer.Argument(help="Worker, for example sort3-0.")],
    run_dir: RunOption = None,
) -> None:
    """Let a worker finish what it has in hand and go."""
    from rolloutmq.launch import steer
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(steer.drain(find_run(run_dir), worker))


@app.command(rich_help_panel=STEER)
def scale(
    env: Annotated[str, typer.Argument(help="Environment, or `inference` for the engines.")],
    count: Annotated[str, typer.Argument(help="Number of workers or engines, or `auto`.")],
    run_dir: RunOption = None,
) -> None:
    """Ask for a number of workers, or give the orchestrator its judgement back."""
    from rolloutmq.launch import steer
    from rolloutmq.launch.rundir import find_run

    if count != "auto" and not count.isdecimal():
        raise typer.BadParameter("must be a number or `auto`", param_hint="count")
    wanted = None if count == "auto" else int(count)
    raise typer.Exit(steer.scale(find_run(run_dir), env, wanted))


@app.command("set", rich_help_panel=STEER)
def set_values(
    values: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="For example env.math.weight=2.")
    ],
    run_dir: RunOption = None,
) -> None:
    """Change weights, bounds and marks of a living run, all that are named or none; a restart keeps them."""
    from rolloutmq.launch import steer
    from rolloutmq.launch.rundir import find_run

    raise typer.Exit(steer.set_values(find_run(run_dir), values))


app.add_typer(services)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from rolloutmq import __version__

        typer.echo(f"rolloutmq {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main() -> None:
    """Run the command line and turn our errors into one line and an exit code."""
    try:
        app()
    except ConfigError as error:
        _fail(error, EXIT_CONFIG)
    except RunDirInUseError as error:
        _fail(error, IN_USE)
    except RolloutMQError as error:
        _fail(error, EXIT_FAILED)


def _fail(error: RolloutMQError, code: int) -> None:
    sys.stderr.write(f"rolloutmq: {error}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
