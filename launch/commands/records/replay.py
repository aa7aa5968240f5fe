"""`rolloutmq replay`: a broker in its own run directory that serves the batches of a recorded run."""

import os
import secrets
from pathlib import Path

import typer

from rolloutmq.bus.rundir import read_run, write_json
from rolloutmq.launch.rundir import claimed, clear
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.printable import shell_word
from rolloutmq.services.broker.replay.core import replay_config
from rolloutmq.services.broker.server import replay as serve


def replay(recorded: Path, run_dir: Path) -> int:
    """Serve the recorded batches until all are settled, and return the exit code. Blocks.

    An earlier run in `run_dir` is moved aside. The recorded run is only read.

    Args:
        recorded: Run directory of the recorded run.
        run_dir: Run directory of the replay; trainers connect to it.

    Raises:
        MissingError: There is no recorded run.
        ConfigError: Both directories are the same.
        RunDirInUseError: An active run owns `run_dir`.
    """
    if run_dir.resolve() == recorded.resolve():
        raise ConfigError("--run-dir", f"is the recorded run (got {run_dir}); name another directory")
    config, _ = read_run(recorded)
    section = config.run.model_copy(update={"dir": run_dir})
    resolved = replay_config(config).model_copy(update={"run": section})
    with claimed(run_dir, secrets.token_hex(8), resume=False) as layout:
        write_json(layout.config, resolved)
        typer.echo(
            f"replaying {recorded}; train with `rolloutmq trainer --run-dir {shell_word(os.path.relpath(layout.root))}`"
        )
        code = serve(recorded.resolve(), layout.root)
        clear(layout)
    return code
