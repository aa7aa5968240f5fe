"""`rolloutmq gateway`: Atropos' HTTP interface, with its own broker or for a running run."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.rundir import load_run
from rolloutmq.launch import local
from rolloutmq.launch.settings import load, overridden
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.gateway.server import main as serve
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of

ALONE: Final = (
    "gateway.enabled=true",
    "trainer.enabled=false",
    "inference.kind=none",
    "broker.high_bytes=2147483648",
    "broker.exact_wait_s=2",
)
"""Overrides of a run with only a broker and a gateway. The high-water mark is large because Atropos environments pace
themselves by batches. `exact_wait_s` is short because its trainers poll once a second."""


def gateway(
    run_dir: Path,
    host: str | None,
    port: int | None,
    config: Path | None,
    assignments: Sequence[str],
    *,
    plain: bool,
    broker_only: bool,
) -> int:
    """Serve until a signal asks to stop, and return the exit code. Blocks; call it from the main thread.

    Registrations and undelivered groups in `run_dir` are kept.

    Raises:
        ConfigError: The configuration is invalid; nothing was started.
        AddressInUseError: Another process listens on the port.
    """
    overrides = [f'gateway.host="{host}"'] if host is not None else []
    overrides += [f"gateway.port={port}"] if port is not None else []
    layout = RunLayout(run_dir)
    if fate_of(layout).life is RunLiveness.LIVING:
        run, _ = load_run(run_dir)
        return serve(run_dir, overridden(run, [*overrides, *assignments]).gateway)
    overrides += ["gateway.listen=false"] if broker_only else []
    extra = [*ALONE, f'run.dir="{run_dir}"', 'run.name="gateway"', *overrides, *assignments]
    resolved = load(config, environ=os.environ, assignments=extra)
    return local.up(resolved, local.UpOptions(resume=True, plain=plain))


_ALIAS: Final = """#!{python}
# `run-api` with the options of Atropos; --reload is accepted and ignored.
import sys

from rolloutmq.launch.cli import main

sys.argv[1:] = ["gateway", *(word for word in sys.argv[1:] if word != "--reload")]
sys.exit(main())
"""


def alias(directory: Path | None = None) -> Path:
    """Install `run-api` as an alias of `rolloutmq gateway` beside this interpreter, and return its path.

    Raises:
        ConfigError: A `run-api` exists; Atropos' own command is not shadowed.
    """
    script = (directory or Path(sys.executable).parent) / "run-api"
    found = shutil.which("run-api", path=os.pathsep.join([str(script.parent), os.environ.get("PATH", "")]))
    if found is not None:
        raise ConfigError("run-api", f"already installed (got {found}); remove it first")
    script.write_text(_ALIAS.format(python=sys.executable))
    script.chmod(0o755)
    return script
