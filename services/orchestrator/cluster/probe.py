"""A look at the cluster of a run before it starts, in a process of its own: the launcher stays free of Ray.

    python -P -m rolloutmq.services.orchestrator.cluster.probe ADDRESS

prints one line of JSON, a `Probe`.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.process import python_command

TIMEOUT_S: Final = 90.0
"""Longest look: the import of Ray takes seconds on a busy machine."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: why there is no cluster, or the address of this host for its nodes and their resources."""

    problem: str = ""
    remedy: str = ""
    host: str = ""
    nodes: tuple[dict[str, float], ...] = ()


def probe(address: str) -> Probe:
    """Look at a cluster; blocks for seconds.

    Raises:
        MissingError: There is none, or its software is not installed.
    """
    command = python_command(sys.executable, __name__, address)
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        why = f"has not answered for {TIMEOUT_S:g} s"
        raise MissingError(_name(address), "see its state with `ray status`", why) from None
    try:
        found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Probe)
    except (IndexError, msgspec.DecodeError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MissingError(_name(address), "see its state with `ray status`", f"fails: {last}") from None
    if found.problem:
        raise MissingError(found.problem, found.remedy)
    return found


def _name(address: str) -> str:
    return f"the Ray cluster at {address or 'this host'}"


def _looked(address: str) -> Probe:
    from rolloutmq.services.orchestrator.cluster.ray_backend import connect, head_address

    try:
        ray = connect(address, "rolloutmq-probe", None)
    except MissingError as error:
        return Probe(problem=error.what, remedy=error.remedy)
    nodes = tuple(
        {name: float(amount) for name, amount in node["Resources"].items()}
        for node in ray.nodes()
        if node["Alive"]
    )
    return Probe(host=head_address(ray), nodes=nodes)


def main() -> None:
    """Look at the cluster of the command line, and print what was found."""
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(_looked, sys.argv[1]).result()
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # without the seconds of a disconnect


if __name__ == "__main__":
    main()
