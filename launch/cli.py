"""The command line.

Every command imports its code when it runs, so that `--help` answers at once.

Exit codes: 0 done, 1 failed, 2 invalid configuration or command line, 4 the run directory is in use, 130 interrupted.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolloutmq.launch.declarations import completion
from rolloutmq.launch.declarations.joining import ProbeDirectory
from rolloutmq.launch.declarations.keys import keys
from rolloutmq.launch.declarations.options import (
    Cluster,
    GroupId,
    Json,
    ProfileBy,
    ReadArgument,
    ReadOption,
    RunArgument,
    RunOption,
    answered,
    named,
    to_prove,
    to_read,
)
from rolloutmq.launch.declarations.records import dead, ledger
from rolloutmq.launch.declarations.remote import Connect, Key, refuse_logs, shown
from rolloutmq.launch.declarations.services import Assignments
from rolloutmq.launch.declarations.services import app as services
from rolloutmq.launch.declarations.steering import STEER
from rolloutmq.launch.declarations.steering import app as steering
from rolloutmq.launch.endings import guarded

app = typer.Typer(
    name="rolloutmq",
    help="Message bus for LLM reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RUN = "Run"
INSPECT = "Inspect"

ConfigFile = Annotated[Path, typer.Argument(help="Run configuration (TOML).", show_default=False)]

app.add_typer(ledger, name="ledger", rich_help_panel=INSPECT)
app.add_typer(dead, name="dead", rich_help_panel=STEER)
app.add_typer(keys, name="keys", rich_help_panel=STEER)


@app.command(rich_help_panel=RUN)
def up(
    config: ConfigFile,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the run directory.")] = False,
    seed: Annotated[int | None, typer.Option(help="Override run.seed.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", "-r", help="Override run.dir, the run directory.")
    ] = None,
    assignments: Assignments = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return as soon as the run has started.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print progress lines, not the live view.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Record every group on disk for `rolloutmq replay`.")
    ] = False,
    cluster: Annotated[
        Cluster | None,
        typer.Option(help="Override cluster.engine, which runs the workers.", show_default=False),
    ] = None,
    probe_dir: ProbeDirectory = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print lines of JSON: progress, then the end.")
    ] = False,
) -> None:
    """Start a run and watch it until it ends."""
    from rolloutmq.launch import local
    from rolloutmq.launch.preflight.checks import loaded

    extra = list(assignments or [])
    extra += [f"run.seed={seed}"] if seed is not None else []
    extra += [f'run.dir="{run_dir}"'] if run_dir is not None else []
    extra += ["broker.replay=true"] if replay else []
    extra += [f"cluster.engine={cluster.value}"] if cluster is not None else []
    resolved = loaded(config, environ=os.environ, assignments=extra, tell=local.tell)
    from rolloutmq.launch.commands import steer
    from rolloutmq.launch.preflight.hub import fetched, sources_of
    from rolloutmq.launch.rundir import require_run
    from rolloutmq.schemas.files import RunLayout

    if resume:
        require_run(resolved.run.dir)
    if detach:  # a download may take longer than one waits for the broker of a detached run
        fetched(resolved, sources_of(RunLayout(resolved.run.dir)) if resume else (), tell=local.tell)
        raise typer.Exit(answered(lambda: steer.detach(resolved, sys.argv[1:]), as_json=as_json))
    options = local.UpOptions(resume=resume, plain=plain, as_json=as_json, probe_dir=probe_dir)
    raise typer.Exit(local.up(resolved, options))


@app.command("try", rich_help_panel=RUN)
def try_rollouts(
    config: ConfigFile,
    env: Annotated[
        str,
        typer.Argument(help="Environment. Default: the only one.", autocompletion=completion.configured),
    ] = "",
    count: Annotated[int, typer.Option("--count", "-n", help="Number of rollouts.", min=1)] = 1,
    size: Annotated[
        int | None,
        typer.Option(help="Sequences of a rollout.  [default: the environment's group_size]", min=1),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Override run.seed.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", metavar="JSON", help="Submitted task to answer, in place of the environment's own."
        ),
    ] = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each rollout.")] = False,
) -> None:
    """Roll out an environment in this process and print tokens, mask, score and time; `breakpoint()` works."""
    from rolloutmq.launch.preflight.checks import loaded

    extra = [*(assignments or []), *([f"run.seed={seed}"] if seed is not None else [])]
    resolved = loaded(config, environ=os.environ, assignments=extra)
    from rolloutmq.launch.preflight import try_rollouts as trying

    payloads = [trying.payload_of(text) for text in task or []]
    options = trying.TryOptions(count=count, size=size or 0, payloads=payloads, as_json=as_json)
    raise typer.Exit(trying.try_rollouts(resolved, env, options))


@app.command(rich_help_panel=RUN)
def check(
    config: ConfigFile,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Time-out of each environment.", min=1.0)
    ] = 60.0,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Check a configuration as `up` does, and report every error; environments make a few scripted rollouts."""
    from rolloutmq.launch.commands import doctor

    code = doctor.check(config, assignments=assignments or [], timeout_s=timeout, as_json=as_json)
    raise typer.Exit(code)


@app.command(rich_help_panel=RUN)
def evaluate(
    config: ConfigFile,
    checkpoint: Annotated[
        Path,
        typer.Option(
            help="Checkpoint directory, or a run directory: its newest checkpoint.", show_default=False
        ),
    ],
    run_dir: Annotated[
        Path | None,
        typer.Option(
            *("--run-dir", "-r"),
            help="Run directory of the evaluation.  [default: run.dir with -evaluation appended]",
        ),
    ] = None,
    assignments: Assignments = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print progress lines, not the live view.")] = False,
) -> None:
    """Evaluate a checkpoint: answer the tasks of the section `evaluation` in a run of its own."""
    from rolloutmq.launch.settings import load

    resolved = load(config, environ=os.environ, assignments=assignments or [])
    own = run_dir or resolved.run.dir.with_name(f"{resolved.run.dir.name}-evaluation")
    section = resolved.run.model_copy(update={"dir": own})
    from rolloutmq.launch.commands import evaluate as evaluating

    resolved = resolved.model_copy(update={"run": section})
    raise typer.Exit(evaluating.evaluate(resolved, checkpoint, plain=plain))


@app.command(rich_help_panel=RUN)
def gateway(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", "-r", help="Run directory: new, resumed, or of an active run.")
    ] = Path("runs/gateway"),
    host: Annotated[str | None, typer.Option(help="Address to bind.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind, 0 for a free one.  [default: 8000]")] = None,
    config: Annotated[Path | None, typer.Option(help="Run configuration (TOML).")] = None,
    assignments: Assignments = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print progress lines, not the live view.")] = False,
    broker_only: Annotated[
        bool, typer.Option("--broker-only", help="Start no HTTP server; serve the ASGI app yourself.")
    ] = False,
) -> None:
    """Serve Atropos environments and trainers over HTTP, in place of `run-api`."""
    from rolloutmq.launch.commands import gateway as serving

    more = assignments or []
    raise typer.Exit(serving.gateway(run_dir, host, port, config, more, plain=plain, broker_only=broker_only))


@app.command("run-api-alias", rich_help_panel=RUN)
def run_api_alias() -> None:
    """Install `run-api` as an alias of `rolloutmq gateway`, unless a `run-api` exists."""
    from rolloutmq.launch.commands import gateway as serving

    typer.echo(f"wrote {serving.alias()}")


@app.command(rich_help_panel=RUN)
def replay(
    recorded: Annotated[Path, typer.Argument(help="Run directory of a run started with --replay.")],
    run_dir: Annotated[
        Path, typer.Option("--run-dir", "-r", help="Run directory of the replay; trainers connect to it.")
    ] = Path("runs/replay"),
) -> None:
    """Replay a recorded run: serve its batches again in the same order, until all are trained."""
    from rolloutmq.launch.commands.records import replay as replaying

    raise typer.Exit(replaying.replay(recorded, run_dir))


@app.command(rich_help_panel=RUN)
def down(
    run_dir: RunArgument = None,
    run: RunOption = None,
    now: Annotated[
        bool, typer.Option("--now", help="Kill its processes, instead of ending them in order.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stop a run in order and save its queues; print what the end waits for."""
    from rolloutmq.launch.commands import steer
    from rolloutmq.launch.rundir import find_run

    where = find_run(named(run_dir, run))
    raise typer.Exit(answered(lambda: steer.down(where, at_once=now), as_json=as_json))


@app.command(rich_help_panel=RUN)
def init(
    directory: Annotated[Path, typer.Argument(help="Directory of the new project.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the environment.  [default: the directory's]")
    ] = None,
    trainer: Annotated[
        bool, typer.Option("--trainer", help="Also write a trainer and a test that kills and restarts it.")
    ] = False,
) -> None:
    """Create a project: an environment, its configuration and a test."""
    from rolloutmq.launch.commands.init import write_project

    for path in write_project(directory, name or directory.resolve().name, trainer=trainer):
        typer.echo(f"wrote {path}")


@app.command(rich_help_panel=RUN)
def doctor(
    run_dir: RunArgument = None,
    run: RunOption = None,
    as_json: Json = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Remove shared memory, sockets and addresses that dead runs left."),
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Verify that an active run trains and samples the same weights.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="Check this configuration too, with all checks of `up`.")
    ] = None,
    rewards: Annotated[
        str | None,
        typer.Option(
            metavar="ENV",
            help="Score the same rollouts of this environment again, also in other processes.",
            autocompletion=completion.configured,
        ),
    ] = None,
) -> None:
    """Check the dependencies of this machine; --sweep cleans up dead runs, --weights verifies shared weights, --rewards
    verifies that an environment (of --config, or of a run) scores the same rollouts the same.
    """
    run_dir = named(run_dir, run)
    if rewards is not None:
        from rolloutmq.launch.commands.scores import repeat as scoring

        raise typer.Exit(scoring.report(rewards, config or run_dir, as_json=as_json))
    if sweep:
        from rolloutmq.launch.commands import sweep as remains

        raise typer.Exit(remains.report(run_dir, as_json=as_json))
    if weights:
        from rolloutmq.launch.commands import weights as proofs

        raise typer.Exit(proofs.report(to_prove(run_dir), as_json=as_json))
    from rolloutmq.launch.commands import doctor as checks

    raise typer.Exit(checks.report(as_json=as_json, file=config))


@app.command(rich_help_panel=INSPECT)
def ratings(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    env: Annotated[
        str | None,
        typer.Option(help="Environment. Default: all.", autocompletion=completion.environments),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="nominal, ordinal, interval or ratio. Default: as configured.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Recompute the agreement of raters, and their disagreement by group, from the groups on disk."""
    from rolloutmq.launch.commands.scores import agree as agreement

    raise typer.Exit(agreement.ratings(to_read(run, run_dir), env, metric, as_json=as_json))


@app.command(rich_help_panel=INSPECT)
def status(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show the state of a run: queues, workers, and the reason why a process waits."""
    from rolloutmq.services.monitor.status.status import status as show

    raise typer.Exit(show(shown(connect, key, run, run_dir), as_json))


@app.command(rich_help_panel=INSPECT)
def workers(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    connect: Connect = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show every worker with its state, and the target count of each environment."""
    from rolloutmq.services.monitor.status.workers import workers as show

    raise typer.Exit(show(shown(connect, key, run, run_dir), as_json))


@app.command(rich_help_panel=INSPECT)
def top(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    connect: Connect = None,
    key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="Show the present state and end.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Use no colours, as with NO_COLOR.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the state as a line of JSON a second; one with --once.")
    ] = False,
) -> None:
    """Watch a run live, and change it by keys: ? lists them."""
    from rolloutmq.bus.lifecycle import gc_paused

    with gc_paused():
        from rolloutmq.schemas.process import python_command
        from rolloutmq.services.monitor.live.top import Shown
        from rolloutmq.services.monitor.live.top import top as watch

        run_dir = shown(connect, key, run, run_dir)
    program = python_command(sys.executable, "rolloutmq.launch.cli")
    raise typer.Exit(watch(run_dir, Shown(once, as_json, no_color, program)))


@app.command(rich_help_panel=INSPECT)
def dashboard(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind, 0 for a free one.", min=0, max=65535)] = 0,
) -> None:
    """Serve the page of a run for a browser, and print its link."""
    from rolloutmq.launch.commands.dashboard import dashboard as serve

    raise typer.Exit(serve(to_read(run, run_dir), host, port))


@app.command(rich_help_panel=INSPECT)
def logs(
    name: Annotated[
        str,
        typer.Argument(help="Process name, for example broker or sort3-0.", autocompletion=completion.logs),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log as it grows.")] = False,
    run_dir: ReadOption = None,
    connect: Connect = None,
) -> None:
    """Print the log of one process."""
    from rolloutmq.services.monitor.text.logs import logs as show

    refuse_logs(connect, name)
    raise typer.Exit(show(to_read(run_dir), name, follow=follow))


@app.command(rich_help_panel=INSPECT)
def tail(
    topic: Annotated[
        str, typer.Argument(help="Topic prefix. Default: all topics.", autocompletion=completion.topics)
    ] = "",
    run_dir: ReadOption = None,
    connect: Connect = None,
    key: Key = None,
) -> None:
    """Print bus events as JSON lines; of an ended run, the recorded ones."""
    from rolloutmq.services.monitor.text.tail import tail as show

    raise typer.Exit(show(shown(connect, key, run_dir), topic))


@app.command(rich_help_panel=INSPECT)
def explain(group_id: GroupId, run_dir: ReadOption = None, as_json: Json = False) -> None:
    """Show the history of a group: origin, deliveries and outcome."""
    from rolloutmq.launch.commands.records import explain

    raise typer.Exit(explain.explain(to_read(run_dir), group_id, as_json=as_json))


@app.command(rich_help_panel=INSPECT)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...", help="Two or more run directories.", autocompletion=completion.runs
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Also draw the runs over each other to this file (.png).", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: steps, groups, rewards, waits, staleness, latencies, and where their configurations differ."""
    from rolloutmq.launch.commands.records.compare import compare

    if len(runs) < 2:
        raise typer.BadParameter(f"name at least two runs (got {len(runs)})", param_hint="RUN_DIR...")
    raise typer.Exit(compare(runs, as_json=as_json, output=output))


@app.command(rich_help_panel=INSPECT)
def report(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the run to this file (.png).", show_default=False)
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Also write the run's page to this file (.html), to open without a server.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the result of a run, and compare produced with trained groups; its directory stays as it is."""
    from rolloutmq.launch.commands import steer

    raise typer.Exit(steer.report(to_read(run, run_dir), as_json=as_json, picture=picture, page=page))


@app.command(rich_help_panel=INSPECT)
def profile(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    by: Annotated[
        ProfileBy | None,
        typer.Option(help="Show percentiles and rates of each such part instead.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where the time of a run goes, what to change, and how long each hop of its groups took."""
    from rolloutmq.launch.commands.records.profile import latencies, profile
    from rolloutmq.services.monitor.profile.latencies import By

    found = to_read(run, run_dir)
    if by is None or by is ProfileBy.ENV:
        raise typer.Exit(profile(found, as_json=as_json))
    raise typer.Exit(latencies(found, By(by.value), as_json=as_json))


@app.command(rich_help_panel=INSPECT)
def simulate(
    start: Annotated[
        list[float] | None, typer.Option(help="Worker start-up time in seconds; repeatable.  [default: 20]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Trials per controller and scenario.")] = 5,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Run only this scenario; repeatable. Default: all.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay a demand trace (CSV: seconds, sequences/s) instead of the built-in scenarios."
        ),
    ] = None,
    plant: Annotated[
        list[Path] | None,
        typer.Option(help="Simulate a plant described in a TOML file instead; repeatable."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of orchestrator.scaling, or of the plants; repeatable.",
        ),
    ] = None,
    controller: Annotated[
        list[str] | None,
        typer.Option(help="Run only this controller, such as rolloutmq; repeatable. Default: all."),
    ] = None,
    decisions: Annotated[
        bool,
        typer.Option(
            "--decisions",
            help="Print the decisions of one trial where target or reason change, instead.",
        ),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Trial of --decisions, from 0.  [default: 0]")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Plot the first seed to this file (.png).")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Recompute the recorded decisions of a run (run directory or decisions.jsonl)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare autoscaling controllers on simulated runs, or recompute the decisions of a recorded run.

    Each figure is the median and the worst of the seeds, then the ratio of the median to that of the reference fleet,
    which knows the demand of the moment and starts workers as slowly. Starved: seconds in which the trainer waited.
    Waste: worker time above the need, relative to the need. Moves: workers started and removed. Flips: changes of
    direction. Settle: seconds until the workers stay within a tenth of the need, after the slowest changes. Peak: most
    workers.
    """
    from rolloutmq.launch.commands import simulate as simulation

    others = {
        "start": start,
        "scenario": scenario,
        "trace": trace,
        "plant": plant,
        "set": settings,
        "controller": controller,
        "picture": picture,
    }
    given = [name for name, value in others.items() if value]
    simulation.check_together(given, is_replay=replay is not None, decisions=decisions, seed=seed)
    if replay is not None:
        raise typer.Exit(simulation.decide_again(replay, as_json=as_json))
    if decisions:
        simulation.print_decisions(
            start or [],
            scenario or [],
            trace,
            plants=plant or [],
            settings=settings or [],
            seed=seed or 0,
            as_json=as_json,
        )
        return
    simulation.simulate(
        start or [],
        seeds,
        scenario or [],
        trace,
        plants=plant or [],
        settings=settings or [],
        controllers=controller or [],
        picture=picture,
        as_json=as_json,
    )


app.add_typer(steering)
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
    """Run the command line; report a RolloutMQ error as one line and an exit code."""
    guarded(app)


if __name__ == "__main__":
    main()
