"""The manifests of `deploy/kubernetes`, and what their containers run, with the paths and ports of this machine."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from tests.launch.commands.remote.hosts import LIMIT_S

ROOT: Final = Path(__file__).parents[5]
DIRECTORY: Final = ROOT / "deploy" / "kubernetes"
CONFIG: Final[dict[str, Any]] = tomllib.loads((DIRECTORY / "run.toml").read_text())
KUSTOMIZATION: Final[dict[str, Any]] = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())


def resources() -> Iterator[dict[str, Any]]:
    """Yield each object of the kustomization."""
    for name in KUSTOMIZATION["resources"]:
        yield from yaml.safe_load_all((DIRECTORY / name).read_text())


def named(kind: str, name: str) -> dict[str, Any]:
    """Return one object."""
    return next(one for one in resources() if (one["kind"], one["metadata"]["name"]) == (kind, name))


def pod_specs() -> dict[str, dict[str, Any]]:
    """Return the pods of the run and of a worker."""
    run, workers = named("StatefulSet", "rolloutmq"), named("Deployment", "rolloutmq-workers")
    return {"run": run["spec"]["template"]["spec"], "worker": workers["spec"]["template"]["spec"]}


class Pod:
    """What the containers of a pod run, on this machine. Its processes have nothing of the test's environment.

    Args:
        spec: Spec of the pod.
        home: Where `~` and temporary files of its processes are; it marks them.
        places: What stands for paths, ports and addresses of the pod.
    """

    def __init__(self, spec: Mapping[str, Any], home: Path, places: Mapping[str, str]) -> None:
        self.spec = spec
        self._home = home
        self._places = places
        self._container = spec["containers"][0]

    def initialize(self) -> None:
        """Run the init containers."""
        for container in self.spec["initContainers"]:
            subprocess.run(self._words(container), env=self._environ(), check=True, timeout=LIMIT_S)

    def start(self, log: Path) -> "subprocess.Popen[bytes]":
        """Start the container's process, with its output in a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self._words(self._container),
                env=self._environ(),
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def passes(self, probe: str) -> bool:
        """Run the command of a probe, `liveness` or `readiness`."""
        command = [self.here(word) for word in self._container[f"{probe}Probe"]["exec"]["command"]]
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
        return done.returncode == 0

    def here(self, text: str) -> str:
        """Return a text of the manifests with the places of this machine."""
        for theirs, ours in self._places.items():
            text = text.replace(theirs, ours)
        return text

    def _words(self, container: Mapping[str, Any]) -> list[str]:
        return [self.here(word) for word in (*container["command"], *container.get("args", ()))]

    def _environ(self) -> dict[str, str]:
        programs = self._home / "bin"
        programs.mkdir(exist_ok=True)
        program = programs / "rolloutmq"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m rolloutmq.launch.cli "$@"\n')
        program.chmod(0o755)
        return {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(self._home),
            "TMPDIR": str(self._home),
            "OMP_NUM_THREADS": "1",
        }
