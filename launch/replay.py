"""Replaying a run: a broker in a directory of its own that serves what another run recorded."""

import os
import secrets
from pathlib import Path

import typer

from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.launch.rundir import claimed, clear
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.broker.replaying import replay_config
from rolloutmq.services.broker.server import replay as serve


def replay(recorded: Path, run_dir: Path) -> int:
    """Serve the batches that a run recorded until all are settled, and return the exit code. Blocks.

    What lies in `run_dir` from a run before is moved aside. The recorded run is only read.

    Args:
        recorded: Run directory of the recorded run.
        run_dir: Run directory of the replay, where trainers find it.

    Raises:
        MissingError: There is no recorded run.
        ConfigError: Both directories are the same.
        RunDirInUseError: A living run owns `run_dir`.
    """
    if run_dir.resolve() == recorded.resolve():
        raise ConfigError("--run-dir", f"{run_dir} is the recorded run, which is only read")
    config, _ = load_run(recorded)
    section = config.run.model_copy(update={"dir": run_dir})
    resolved = replay_config(config).model_copy(update={"run": section})
    with claimed(run_dir, secrets.token_hex(8), resume=False) as layout:
        write_json(layout.config, resolved)
        typer.echo(
            f"replaying {recorded}; train with `rolloutmq trainer --run-dir {os.path.relpath(layout.root)}`"
        )
        code = serve(recorded.resolve(), layout.root)
        clear(resolved, layout)
    return code
