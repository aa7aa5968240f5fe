"""What `up` adds to the configuration of a run on a cluster: a listener, keys, engines in reach, a stream of weights.

What the user has configured stays. The run's own key directory is in its run directory, and so is the one key of its
workers, and that of its engines: the cluster runs them for one user, and they are revoked with the end of the run.
"""

import hashlib
import importlib.util
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.keys.key_files import write_secret
from rolloutmq.schemas.config.base import location_of, problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    AddressInUseError,
    ConfigError,
    PackageMissingError,
    RolloutMQError,
    install_remedy,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.address import LISTEN_PORTS, host_and_port, is_loopback, listen_of
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.orchestrator.cluster.messages import Hold
from rolloutmq.services.orchestrator.cluster.probe import Probe, hold, probe

logger = logging.getLogger(__name__)

FIRST_PORTS: Final = range(20_000, 30_000)
"""Ports of a listener that nobody has configured: below those that systems give to outgoing connections."""
TRIES: Final = 200
LOOPBACK: Final = "127.0.0.1"
DEFAULT_LISTEN: Final = "tcp://127.0.0.1:0"
"""`weights.listen` of a run that has not configured it."""
WILDCARDS: Final = frozenset({"0.0.0.0", "[::]"})
KEY_NAME: Final = "cluster-"
"""Beginning of the name of the workers' key; the run token follows."""
ENGINE_KEY_NAME: Final = "cluster-engine-"
"""Beginning of the name of the engines' key."""


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
        ConfigError: The keys that the user has configured cannot be used, or the nodes cannot reach the weights.
        PackageMissingError: Engines get encrypted weights, and the package for it is not installed.
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
    if config.places_engines:
        tree["weights"] |= _streamed(config, host)
    config = _validated(tree)
    _require_cipher(config)
    if config.broker.keys:
        keys_of_run = KeyDirectory(config.base_dir / config.broker.keys)
        for file, name, role in _keys(layout, token):
            _revoke_left(keys_of_run, file)
            if role is Role.WORKER or config.places_engines:
                write_secret(file, keys_of_run.new(name, role, ca=_authority(config)))
    logger.info("nodes reach the run at address=%s", reached_at(config))
    return config


def reserved(config: RunConfig, layout: RunLayout, token: str) -> tuple[str, ...]:
    """Have the cluster keep the reserved part of this host for the run; return the ids of its GPUs.

    Blocks for seconds, and at most for `cluster.placement_timeout_s` more while others use it. The cluster service then
    renews the lease, and gives the part back at the end of the run.

    Raises:
        ConfigError: The host has not so much, or others do not leave it in time.
        MissingError: The cluster does not answer.
    """
    own = config.cluster
    if not own.reserves:
        return ()
    found = hold(
        own.address,
        Hold(
            namespace=namespace_of(layout),
            token=token,
            cpus=own.reserve_cpus,
            gpus=own.reserve_gpus,
            lease_s=own.lease_s,
            timeout_s=own.placement_timeout_s,
        ),
    )
    if found.problem:
        key, _, problem = found.problem.partition(": ")
        raise ConfigError(key, problem)
    logger.info("the cluster keeps of this host cpus=%g gpus=%s", own.reserve_cpus, ",".join(found.gpus))
    return found.gpus


def namespace_of(layout: RunLayout) -> str:
    """Return the name of a run directory on a cluster: the same after a resume, and of no other directory."""
    place = f"{socket.gethostname()}:{os.geteuid()}:{layout.root.resolve()}"
    return f"rolloutmq-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


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


def _streamed(config: RunConfig, host: str) -> dict[str, Any]:
    """Return the settings by which a relay on this host serves the weights to the nodes.

    Raises:
        ConfigError: A configured address is not one that they reach.
    """
    found: dict[str, Any] = {"backend": "stream"}
    bound, _ = host_and_port(config.weights.listen) or ("", 0)
    if is_loopback(bound) and not is_loopback(host):
        if config.weights.listen != DEFAULT_LISTEN:
            raise ConfigError(
                "weights.listen",
                f"the nodes of the cluster do not reach it (got {config.weights.listen!r}); give an address of this "
                "host, or leave it out",
            )
        found["listen"] = f"tcp://{_bracketed(host)}:0"
    return found


def _require_cipher(config: RunConfig) -> None:
    bound, _ = host_and_port(config.weights.listen) or ("", 0)
    is_clear = config.weights.insecure or is_loopback(bound)
    if config.places_engines and not is_clear and importlib.util.find_spec("cryptography") is None:
        raise PackageMissingError(
            "the package cryptography",
            f"{install_remedy('cluster')}, also on the nodes: the weights of their engines are encrypted with it; or "
            "set cluster.place_engines = false",
        )


def _revoke_left(keys: KeyDirectory, file: Path) -> None:
    """Revoke the key that a killed run of this directory has left, and remove it."""
    if not file.exists():
        return
    try:
        name = load_bundle(file).name
        if name.startswith(KEY_NAME):
            keys.revoke(name)
    except RolloutMQError as error:
        logger.warning("key of an earlier life not revoked file=%s error=%s", file, error)
        return
    file.unlink(missing_ok=True)


def _validated(tree: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(location_of(first)) or "configuration", problem_of(first)) from None


def closed(config: RunConfig, layout: RunLayout, token: str) -> None:
    """Revoke the keys of workers and engines, and remove them, at the end of the run."""
    if config.cluster.engine == "local" or not config.broker.keys:
        return
    for file, name, _ in _keys(layout, token):
        if not file.exists():
            continue
        try:
            KeyDirectory(config.base_dir / config.broker.keys).revoke(name)
        except RolloutMQError as error:
            logger.error("key not revoked name=%s error=%s", name, error)
            continue  # its file stays: the next run of this directory revokes it
        file.unlink(missing_ok=True)


def _authority(config: RunConfig) -> str:
    """Return the certificates that clients of the run trust; empty for those of their systems."""
    path = config.run.tls_ca
    try:
        return "" if path is None else (config.base_dir / path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("run.tls_ca", f"cannot be read (got {path}: {error}); name a file in PEM") from None


def _keys(layout: RunLayout, token: str) -> Iterator[tuple[Path, str, Role]]:
    """Yield file, name and role of each key of the nodes."""
    yield layout.cluster_key, f"{KEY_NAME}{token}", Role.WORKER
    yield layout.cluster_engine_key, f"{ENGINE_KEY_NAME}{token}", Role.ENGINE


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
