"""What `up` adds to the configuration of a run whose workers a cluster places: a listener, a key, engines in reach.

What the user has configured stays. The run's own key directory is in its run directory, and so is the one key of its
workers: the cluster runs them for one user, and it is revoked with the end of the run.
"""

import logging
import secrets
import socket
from contextlib import ExitStack, suppress
from typing import Any, Final

from pydantic import ValidationError

from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.keys.key_files import write_secret
from rolloutmq.schemas.config.base import location_of, problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.address import LISTEN_PORTS, is_loopback
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.orchestrator.cluster.probe import Probe, probe

logger = logging.getLogger(__name__)

FIRST_PORTS: Final = range(20_000, 30_000)
"""Ports of a listener that nobody has configured: below those that systems give to outgoing connections."""
TRIES: Final = 200
LOOPBACK: Final = "127.0.0.1"


def looked_at(config: RunConfig) -> Probe | None:
    """Look at the cluster of a run; None for a run of this host alone. Blocks for seconds.

    Raises:
        MissingError: There is no cluster, or Ray is not installed.
    """
    return None if config.cluster.engine == "local" else probe(config.cluster.address)


def opened(config: RunConfig, layout: RunLayout, token: str, found: Probe | None) -> RunConfig:
    """Return the configuration of a run that the nodes of its cluster reach; make its keys.

    Args:
        config: The configuration.
        layout: The claimed run directory.
        token: Run token, which names the key.
        found: What was found of the cluster; None for a run of this host alone.

    Raises:
        AddressInUseError: No ports are free for the listener.
        ConfigError: The keys that the user has configured cannot be used.
    """
    if found is None:
        return config
    host = config.cluster.host or found.host
    tree = config.model_dump()
    if not config.broker.listen:
        tree["broker"]["listen"] = f"tcp://{_bracketed(host)}:{_free_port(host)}"
    if not config.broker.keys and not config.broker.insecure:
        keys = layout.root / "keys"
        if not keys.exists():
            KeyDirectory.create(keys)
        tree["broker"]["keys"] = str(keys)
    for section in ("inference", "teacher"):
        if tree[section]["host"] == LOOPBACK and not is_loopback(host):
            tree[section]["host"] = host
    config = _validated(tree)
    if config.broker.keys:
        bundle = KeyDirectory(config.base_dir / config.broker.keys).new(_key_name(token), Role.WORKER)
        write_secret(layout.cluster_key, bundle)
    logger.info("nodes reach the run at address=%s", config.broker.listen)
    return config


def _validated(tree: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(location_of(first)) or "configuration", problem_of(first)) from None


def closed(config: RunConfig, layout: RunLayout, token: str) -> None:
    """Revoke the key of the workers, and remove it, at the end of the run."""
    if config.cluster.engine == "local" or not config.broker.keys:
        return
    layout.cluster_key.unlink(missing_ok=True)
    with suppress(RolloutMQError):
        KeyDirectory(config.base_dir / config.broker.keys).revoke(_key_name(token))


def _key_name(token: str) -> str:
    return f"cluster-{token}"


def _free_port(host: str) -> int:
    """Return the first of the ports of a listener: fixed, so that a restarted broker is found again."""
    for _ in range(TRIES):
        first = secrets.choice(FIRST_PORTS)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + LISTEN_PORTS):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                stack.enter_context(socket.socket(family)).bind((host, port))
            return first
    raise AddressInUseError(f"tcp://{host}", "other programs, on all ports tried", "set broker.listen")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
