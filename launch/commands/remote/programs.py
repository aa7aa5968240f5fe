"""What joins a run of another host: workers of an environment, ranks of the trainer, engines, a relay."""

import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.engine_registry import FIRST
from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.bus.transport.mirror.engine_beats import EngineBeats
from rolloutmq.launch.commands.remote.configured import receiving, rolling, training
from rolloutmq.launch.commands.remote.earlier_run import TRAINER, WORKERS
from rolloutmq.launch.commands.remote.joining import Joining, join
from rolloutmq.launch.commands.remote.own_code import OwnCode
from rolloutmq.launch.commands.remote.relay_beats import PREFIX, RelayBeats
from rolloutmq.launch.commands.remote.served import Served
from rolloutmq.schemas.errors import ConfigError, RefusedError
from rolloutmq.schemas.files import Connection
from rolloutmq.schemas.network.address import host_and_port
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.envelope import ErrorCode, Name
from rolloutmq.schemas.wire.joining import GetWeightsTicket
from rolloutmq.services.broker.requests.roles import refusal

COUNT_LIMIT: Final = 1024
"""Most workers of one command."""
_BASE: Final = re.compile(r"[A-Za-z0-9_]{1,40}")
_RELAY: Final = re.compile(re.escape(PREFIX) + _BASE.pattern)


@dataclass(frozen=True)
class Way:
    """How a program joins: the run, the directory of this host, the grace at its end, a name for this host, and the
    directory for the files of probes, if there are any."""

    connection: Connection
    directory: Path | None = None
    grace_s: float = 25.0
    name: str = ""
    probe_dir: Path | None = None

    @property
    def base(self) -> str:
        """Part of the names of its programs. Raises ConfigError if it cannot be one."""
        base = (
            self.name
            or re.sub(r"\W", "_", socket.gethostname().partition(".")[0], flags=re.ASCII)[:40]
            or "host"
        )
        if _BASE.fullmatch(base) is None:
            raise ConfigError("--name", f"must be at most 40 letters, digits or `_` (got {base!r})")
        return base


def join_workers(env: str, count: int, own: OwnCode, way: Way) -> int:
    """Roll out an environment of a run of another host; return the exit code. Blocks.

    Args:
        env: Name of the environment.
        count: Number of worker processes.
        own: What the run may have this host load.
        way: How they join.

    Raises:
        ConfigError: The name of the environment or of the workers cannot be one.
    """
    name = f"{env}-{way.base}"
    names = [f"{name}.{number}" for number in range(count)]
    _require_names(names)
    programs = tuple((one, Role.WORKER, ("worker", "--worker", one)) for one in names)
    accept = rolling([env], own)
    way_of = Joining(
        *(name, programs, way.connection, accept, way.directory, way.grace_s),
        own=WORKERS,
        is_alone=True,
        probe_dir=way.probe_dir,
    )
    return join(way_of)


def join_trainer(ranks: Iterable[int], model: Path | None, way: Way) -> int:
    """Run ranks of the trainer of a run of another host; return the exit code. Blocks.

    Args:
        ranks: Ranks on this host: all of them, since ranks meet on loopback.
        model: Directory of the model, for a run that has one by path.
        way: How they join.
    """
    programs = tuple((f"trainer.{rank}", Role.TRAINER, ("trainer", "--rank", str(rank))) for rank in ranks)
    accept = training(model)
    return join(
        Joining(
            "trainer",
            programs,
            way.connection,
            accept,
            way.directory,
            way.grace_s,
            own=TRAINER,
            follows=False,
            probe_dir=way.probe_dir,
        )
    )


def join_engine(served: Served, model: Path | None, way: Way) -> int:
    """Serve the policy of a run of another host; return the exit code. Blocks.

    Args:
        served: Where the engine listens, and where others reach it.
        model: Directory of the model, for a run that has one by path.
        way: How it joins.
    """
    name = f"{FIRST}.{way.base}"
    _require_names([name])
    connection = way.connection
    served.check(connection.addresses[0], load_bundle(Path(connection.key)).ca if connection.key else "")
    beats = EngineBeats(name, served.url)
    programs = ((name, Role.INFERENCE, ("inference", "--engine", name)),)
    accept = served.accepting(training(model))
    if served.is_clear:
        sys.stderr.write(
            f"warning: tokens travel unencrypted to {served.host}; give --tls-cert and --tls-key\n"
        )
    return join(
        Joining(
            *(name, programs, way.connection, accept, way.directory, way.grace_s, beats.run),
            serves=True,
            is_needed_by_run=True,
            probe_dir=way.probe_dir,
        )
    )


@dataclass(frozen=True)
class Passing:
    """From whom a relay gets the weights, and to whom it passes them.

    Attributes:
        listen: Address to serve them at for further relays; empty for none.
        advertise: Host by which those reach it; empty for the bound one.
        behind: Name of the relay that sends them; empty for that of the run.
    """

    listen: str = ""
    advertise: str = ""
    behind: str = ""


def join_relay(passing: Passing, way: Way) -> int:
    """Receive the weights of a run of another host for the engines of this one; return the exit code. Blocks.

    Args:
        passing: From whom, and to whom.
        way: How it joins.

    Raises:
        ConfigError: The address or a name cannot be one.
        RefusedError: A key of this role may not have the weights.
    """
    name = f"{PREFIX}{way.base}"
    _require_names([name])
    if passing.behind and _RELAY.fullmatch(passing.behind) is None:
        raise ConfigError("--behind", f"must be the name of a relay, relay.NAME (got {passing.behind!r})")
    if passing.behind == name:
        raise ConfigError("--behind", f"names this relay itself (got {name}); name another one")
    if passing.listen and host_and_port(passing.listen) is None:
        raise ConfigError("--listen", f"must be tcp://HOST:PORT (got {passing.listen!r}); port 0 takes any")
    if way.connection.key:
        bundle = load_bundle(Path(way.connection.key))
        if why := refusal(
            bundle.name, bundle.role, GetWeightsTicket
        ):  # the broker would say so every two seconds
            raise RefusedError(ErrorCode.FORBIDDEN, why)
    words = ["relay"]
    words += ["--listen", passing.listen] if passing.listen else []
    words += ["--behind", passing.behind] if passing.behind else []
    programs = (("relay", Role.RELAY, tuple(words)),)
    beats = RelayBeats(name, passing.listen, passing.advertise, passing.behind)
    return join(
        Joining(
            *("relay", programs, way.connection, receiving, way.directory, way.grace_s, beats.run),
            is_needed_by_run=True,
            probe_dir=way.probe_dir,
        )
    )


def _require_names(names: Iterable[str]) -> None:
    for name in names:
        try:
            msgspec.convert(name, Name)
        except msgspec.ValidationError:
            raise ConfigError(
                "--name", f"makes the name {name}, which must be at most 64 letters, digits, `.`, `_` or `-`"
            ) from None
