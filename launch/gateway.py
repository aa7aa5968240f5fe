"""`rolloutmq gateway`: the HTTP interface of Atropos, with a broker of its own or for a run that lives."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.rundir import load_run
from rolloutmq.launch import local
from rolloutmq.launch.settings import load
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.gateway.server import main as serve
from rolloutmq.services.monitor.life import Life, fate_of

ALONE: Final = (
    "gateway.enabled=true",
    "trainer.enabled=false",
    "inference.kind=none",
    "broker.high_bytes=2147483648",
    "broker.exact_wait_s=2",
)
"""What a run is that has only a broker and a gateway. Its environments pace themselves by batches, so the mark may be
wide; and a trainer that asks once a second need not wait for long for a combination of whole groups."""


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
    """Serve until the end is asked for, and return the exit code. Blocks; for the main thread.

    What lies in `run_dir` from before goes on: registrations, and groups that no trainer has had.

    Raises:
        ConfigError: The configuration cannot work; nothing was started.
        AddressInUseError: Somebody else has the port.
    """
    told = [f'gateway.host="{host}"'] if host is not None else []
    told += [f"gateway.port={port}"] if port is not None else []
    told += ["gateway.listen=false"] if broker_only else []
    layout = RunLayout(run_dir)
    if fate_of(layout).life is Life.LIVING:
        run, _ = load_run(run_dir)
        changed = run.gateway.model_copy(update={"host": host or run.gateway.host})
        return serve(run_dir, changed if port is None else changed.model_copy(update={"port": port}))
    extra = [*ALONE, f'run.dir="{run_dir}"', 'run.name="gateway"', *told, *assignments]
    resolved = load(config, environ=os.environ, assignments=extra)
    return local.up(resolved, local.UpOptions(resume=True, plain=plain))


_ALIAS: Final = """#!{python}
# `run-api` as Atropos had it: the same options, and --reload, which has no meaning here.
import sys

from rolloutmq.launch.cli import main

sys.argv[1:] = ["gateway", *(word for word in sys.argv[1:] if word != "--reload")]
sys.exit(main())
"""


def alias(directory: Path | None = None) -> Path:
    """Write a `run-api` that is `rolloutmq gateway`, beside this interpreter, and return its path.

    Raises:
        ConfigError: There is a `run-api` already: Atropos' own is not shadowed.
    """
    script = (directory or Path(sys.executable).parent) / "run-api"
    found = shutil.which("run-api", path=os.pathsep.join([str(script.parent), os.environ.get("PATH", "")]))
    if found is not None:
        raise ConfigError("run-api", f"{found} is there already, and stays")
    script.write_text(_ALIAS.format(python=sys.executable))
    script.chmod(0o755)
    return script
