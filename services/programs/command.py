"""The command of a program: its arguments, variables and directory, and where it finds the gateway.

A program takes part by HTTP alone. Each worker has a base URL of its own at the gateway, `/w/<worker>`: so every
request tells the worker, whatever the program sends.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rolloutmq.bus.lifecycle import hide
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.schemas.config.command import filled, problem_of_secrets, resolved, secrets_in
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import GatewayAddress, RunLayout
from rolloutmq.schemas.process import ProcessSpec, Restart, Role
from rolloutmq.services.http_server.access import with_token
from rolloutmq.services.http_server.run_token import http_token
from rolloutmq.services.process.identity import runs

WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})
WORKER_PATH: Final = "/w/"
"""First part of the path of a worker's base URL; its name follows."""
RUN_DIR: Final = "\0run_dir\0"
"""Stands for the run directory of a node, which the node fills in; no argument of a program can have it."""
WRONG_USE: Final = 2
"""Exit code of a program that does not accept its arguments: a restart would not help."""


class ProgramCommands:
    """Commands of the programs of a run.

    Args:
        config: Configuration of the run.
        layout: Run directory; has the gateway's address if the system chose its port.
    """

    def __init__(self, config: RunConfig, layout: RunLayout) -> None:
        self._config = config
        self._layout = layout
        self._is_here = config.cluster.engine == "local"
        self._token = http_token(config) if self._is_here else self._token_of_nodes()
        hide(self._token, "TOKEN")  # it is in the URLs of the programs

    @property
    def can_start(self) -> bool:
        """Return whether the gateway's address is known. A file of an earlier gateway may have another port."""
        if self._config.gateway.port:
            return True
        address = read_json(self._layout.gateway, GatewayAddress)
        return address is not None and runs(address.pid)

    def spec(self, worker: str, env: str, number: int) -> ProcessSpec:
        """Return the process of a worker; call it while `can_start`.

        Raises:
            ConfigError: A variable names a secret that is not set.
        """
        section = self._config.environment[env]
        if problem := problem_of_secrets(section.variables, os.environ):
            raise ConfigError(f"environment.{env}.variables", problem)
        values = self._values(worker, env, number)
        own = {
            "ROLLOUTMQ_WORKER": worker,
            "ROLLOUTMQ_ENVIRONMENT": env,
            "ROLLOUTMQ_GATEWAY_URL": values["gateway_url"],
            "ROLLOUTMQ_RUN_DIR": values["run_dir"],
            **(self._trust() if self._is_here else {}),  # a node has the authority in a file of its own
        }
        return ProcessSpec(
            name=worker,
            role=Role.WORKER,
            argv=tuple(filled(text, values) for text in section.command),
            env={**{name: _value(text, values) for name, text in section.variables.items()}, **own},
            cwd=str(self._config.base_dir.resolve()),
            log=str(self._layout.log(worker)),
            restart=Restart.ALWAYS,
            hopeless=(WRONG_USE,),
            foreign=True,
            kind=env,
        )

    def _trust(self) -> Mapping[str, str]:
        ca = self._config.run.tls_ca
        return {} if ca is None else {"ROLLOUTMQ_TLS_CA": str((self._config.base_dir / ca).resolve())}

    def _values(self, worker: str, env: str, number: int) -> Mapping[str, str]:
        section = self._config.environment[env]
        return {
            "worker": worker,
            "number": str(number),
            "environment": env,
            "gateway_url": f"{with_token(self._gateway(), self._token)}{WORKER_PATH}{worker}",
            "inference_url": self._inference(),
            "run_dir": str(self._layout.root.resolve()) if self._is_here else RUN_DIR,
            "seed": str(self._config.run.seed + number),
            "group_size": str(section.group_size),
            "concurrency": str(section.concurrency),
            "enough_batches": str(section.enough_batches),
        }

    def _gateway(self) -> str:
        gateway = self._config.gateway
        address = None if gateway.port else read_json(self._layout.gateway, GatewayAddress)
        port = gateway.port if address is None else urlsplit(address.url).port or 0
        return self._url(gateway.host, port)

    def _url(self, bound: str, port: int) -> str:
        """Return the URL of a server of this host, as the programs reach it."""
        if not self._is_here and bound in WILDCARDS:
            bound = self._config.cluster.host
        return http_url(bound, port, self._config.run.scheme)

    def _token_of_nodes(self) -> str:
        """Return the token of the workers' key: that of the run itself does not leave this host."""
        return load_bundle(self._layout.cluster_key).token if self._layout.cluster_key.exists() else ""

    def _inference(self) -> str:
        inference = self._config.inference
        if inference.kind == "external":
            return inference.url
        return f"{with_token(self._url(inference.host, inference.port), self._token)}/v1"


def _value(text: str, values: Mapping[str, str]) -> str:
    """Return the value of a variable: a secret, or the text with its placeholders filled."""
    return filled(text, values) if not any(secrets_in(text)) else str(resolved(text, os.environ))


def check_command(env: str, command: tuple[str, ...], base_dir: Path, *, is_here: bool = True) -> None:
    """Check that there is a program to run, without running it.

    Args:
        env: Its environment.
        command: Program and arguments.
        base_dir: Directory of the configuration.
        is_here: It runs on this host; the PATH of another one is unknown here.

    Raises:
        ConfigError: There is none.
    """
    program = command[0]
    if not is_here and "/" not in program:
        return
    found = base_dir.resolve() / program if "/" in program else program
    if "{" not in program and shutil.which(found) is None:
        where = str(found) if "/" in program else f"{program} on PATH"
        raise ConfigError(f"environment.{env}.command", f"there is no program {where}")


def split_path(path: str) -> tuple[str, str]:
    """Return the worker of a request's path, and the path without it; no worker if it names none."""
    if not path.startswith(WORKER_PATH):
        return "", path
    worker, _, rest = path.removeprefix(WORKER_PATH).partition("/")
    return worker, f"/{rest}"
