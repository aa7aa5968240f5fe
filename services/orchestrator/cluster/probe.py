"""What the launcher asks of a cluster before its run starts, in a process of its own: the launcher stays free of Ray.

    python -P -m rolloutmq.services.orchestrator.cluster.probe ADDRESS [HOLD]

prints one line of JSON: a `Probe`, or with `HOLD`, a `Hold` as JSON, what was `Held`.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from rolloutmq.schemas.errors import MissingError, RolloutMQError
from rolloutmq.schemas.process import python_command
from rolloutmq.services.orchestrator.cluster.messages import Held, Hold

TIMEOUT_S: Final = 90.0
"""Longest look: the import of Ray takes seconds on a busy machine."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: why there is no cluster, or the address of this host for its nodes and their resources."""

    problem: str = ""
    remedy: str = ""
    host: str = ""
    nodes: tuple[dict[str, float], ...] = ()


_Told = TypeVar("_Told", Probe, Held)


def probe(address: str) -> Probe:
    """Look at a cluster; blocks for seconds.

    Raises:
        MissingError: There is none, or its software is not installed.
    """
    found = _asked(address, Probe, TIMEOUT_S)
    if found.problem:
        raise MissingError(found.problem, found.remedy)
    return found


def hold(address: str, wanted: Hold) -> Held:
    """Have a cluster keep resources of this host until the run is silent. Blocks for seconds, and for the wait.

    Raises:
        MissingError: There is no cluster.
    """
    return _asked(address, Held, TIMEOUT_S + wanted.timeout_s, msgspec.json.encode(wanted).decode())


def _asked(address: str, kind: type[_Told], timeout_s: float, *words: str) -> _Told:
    command = python_command(sys.executable, __name__, address, *words)
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        why = f"has not answered for {timeout_s:g} s"
        raise MissingError(_name(address), "see its state with `ray status`", why) from None
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=kind)
    except (IndexError, msgspec.DecodeError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MissingError(_name(address), "see its state with `ray status`", f"fails: {last}") from None


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


def _held(address: str, wanted: Hold) -> Held:
    from rolloutmq.services.orchestrator.cluster.ray_backend import RayBackend

    try:
        backend = RayBackend(address, wanted.namespace, wanted.token, None)
        backend.found()  # ends what a killed run of this directory holds
        return Held(gpus=backend.hold(wanted))
    except RolloutMQError as error:
        return Held(problem=str(error))


def main() -> None:
    """Do what the command line says, and print the answer."""
    address, *words = sys.argv[1:]
    with ThreadPoolExecutor(1) as thread:
        if words:
            told = msgspec.json.encode(
                thread.submit(_held, address, msgspec.json.decode(words[0], type=Hold)).result()
            )
        else:
            told = msgspec.json.encode(thread.submit(_looked, address).result())
    sys.stdout.write(told.decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # without the seconds of a disconnect


if __name__ == "__main__":
    main()
