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

from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.keys.key_files import write_secret
from rolloutmq.schemas.config.base import location_of, problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.address import LISTEN_PORTS, is_loopback, listen_of
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.orchestrator.cluster.probe import Probe, probe

logger = logging.getLogger(__name__)

FIRST_PORTS: Final = range(20_000, 30_000)
"""Ports of a listener that nobody has configured: below those that systems give to outgoing connections."""
TRIES: Final = 200
LOOPBACK: Final = "127.0.0.1"
WILDCARDS: Final = frozenset({"0.0.0.0", "[::]"})
KEY_NAME: Final = "cluster-"
"""Beginning of the name of the workers' key; the run token follows."""


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
    _check_listen(config.broker.listen, host)
    tree = config.model_dump()
    tree["cluster"]["host"] = host
    if not config.broker.listen:
        tree["broker"]["listen"] = f"tcp://{_bracketed(host)}:{_free_port(host)}"
    if not config.broker.keys and not config.broker.insecure:
        keys = layout.root / "keys"
        if not keys.exists():
            KeyDirectory.create(keys)
        tree["broker"]["keys"] = str(keys)
    programs = ["gateway"] if any(env.command for env in config.environment.values()) else []
    for section in ("inference", "teacher", *programs):
        if tree[section]["host"] == LOOPBACK and not is_loopback(host):
            tree[section]["host"] = host
    config = _validated(tree)
    if config.broker.keys:
        keys_of_run = KeyDirectory(config.base_dir / config.broker.keys)
        _revoke_left(keys_of_run, layout)
        bundle = keys_of_run.new(_key_name(token), Role.WORKER, ca=_authority(config))
        write_secret(layout.cluster_key, bundle)
    logger.info("nodes reach the run at address=%s", reached_at(config))
    return config


def reached_at(config: RunConfig) -> str:
    """Return the address of the broker for the nodes: a wildcard stands for the host that they know."""
    listen = listen_of(config.broker.listen)
    if listen is None or listen.host not in WILDCARDS:
        return config.broker.listen
    return f"tcp://{_bracketed(config.cluster.host)}:{listen.port}"


def _check_listen(listen: str, host: str) -> None:
    """Raise ConfigError if the nodes cannot reach a configured listener."""
    found = listen_of(listen)
    if found is not None and (not found.port or (found.is_local and not is_loopback(host))):
        raise ConfigError(
            "broker.listen",
            f"the nodes of the cluster do not reach it (got {listen!r}); give a fixed port and an address of this "
            "host, or leave it out",
        )


def _revoke_left(keys: KeyDirectory, layout: RunLayout) -> None:
    """Revoke the key that a killed run of this directory has left."""
    if not layout.cluster_key.exists():
        return
    try:
        name = load_bundle(layout.cluster_key).name
        if name.startswith(KEY_NAME):
            keys.revoke(name)
    except RolloutMQError as error:
        logger.warning("key of an earlier life not revoked file=%s error=%s", layout.cluster_key, error)


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
    try:
        KeyDirectory(config.base_dir / config.broker.keys).revoke(_key_name(token))
    except RolloutMQError as error:
        logger.error("key of the workers not revoked name=%s error=%s", _key_name(token), error)
        return  # its file stays: the next run of this directory revokes it
    layout.cluster_key.unlink(missing_ok=True)


def _authority(config: RunConfig) -> str:
    """Return the certificates that clients of the run trust; empty for those of their systems."""
    path = config.run.tls_ca
    try:
        return "" if path is None else (config.base_dir / path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("run.tls_ca", f"cannot be read (got {path}: {error}); name a file in PEM") from None


def _key_name(token: str) -> str:
    return f"{KEY_NAME}{token}"


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
