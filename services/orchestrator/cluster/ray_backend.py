"""Ray as the cluster of a run: one detached actor for each life, named in a namespace of the run.

An actor outlives the connection that made it, so the next cluster service finds it by its name, `TOKEN NAME LIFE`. It
is never restarted by Ray: the orchestrator decides on restarts. Ray decides where an actor runs, by its resources.

Ray is imported here alone, in the process of the cluster service and in the actors.
"""

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.schemas.errors import MissingError, PackageMissingError, install_remedy
from rolloutmq.services.orchestrator.cluster.backend import Answer, ClusterLostError
from rolloutmq.services.orchestrator.cluster.messages import HostOrder, HostState, cut
from rolloutmq.services.orchestrator.cluster.resources import Need

logger = logging.getLogger(__name__)

LONG_POLL_S: Final = 2.0
"""Longest time that a host waits for news before it answers; it renews the lease."""
THREADS: Final = 4
"""Calls that an actor takes at once: a signal does not wait for a look."""
EXCLUDES: Final = ("runs/", ".git/", ".venv*/", "__pycache__/", "*.pyc", "*.key")
"""What is not sent along with the code of environments: private keys are for no other host."""


class RayActor:
    """The actor of one life, on its host. Ray makes it; all it does is in `HostProcess`."""

    def __init__(self, order: bytes) -> None:
        import os

        from rolloutmq.services.orchestrator.cluster.host_process import HostProcess

        self._process = HostProcess(msgspec.msgpack.decode(order, type=HostOrder), lambda: os._exit(0))

    def look(self, acked: int, wait_s: float) -> bytes:
        """Return the state and output of the process, a `HostState`."""
        return msgspec.msgpack.encode(self._process.look(acked, wait_s))

    def send(self, number: int, group: bool) -> None:
        """Signal the process."""
        self._process.send(number, group)

    def close(self) -> None:
        """Kill the process and remove its files."""
        self._process.close()


class RayBackend:
    """A connection to a Ray cluster.

    Args:
        address: Address of the cluster; empty for the one that runs on this host.
        namespace: Namespace of the run's actors.
        token: Run token; actors of another one are of an earlier run in the same directory.
        code: Directory that is sent to the hosts, with the code of the environments; None for none.
        excludes: Further paths that are not sent.

    Raises:
        PackageMissingError: Ray is not installed.
        MissingError: No cluster runs at the address.
    """

    def __init__(
        self, address: str, namespace: str, token: str, code: Path | None, excludes: tuple[str, ...] = ()
    ) -> None:
        self._ray = connect(address, namespace, code, excludes)
        self._token = token
        self._actors: dict[str, Any] = {}
        self._unplaced: set[str] = set()
        """Lives whose actors have not answered yet: perhaps no host has one."""
        self._asked: dict[Any, str] = {}
        """Life by the reference of a question."""

    def found(self) -> list[tuple[str, str]]:
        """Return life and name of the run's actors; kill those of an earlier run."""
        lives = []
        for name in self._ray.util.list_named_actors():
            token, _, rest = name.partition(" ")
            process, _, life = rest.partition(" ")
            try:
                actor = self._ray.get_actor(name)
            except ValueError:  # it has just died
                continue
            if token != self._token:
                logger.warning("ending an actor of an earlier run name=%s", process)
                self._end(actor)
                continue
            self._actors[life] = actor
            lives.append((life, process))
        return lives

    def start(self, order: HostOrder, need: Need) -> None:
        """Make the actor of a life."""
        actor = self._ray.remote(RayActor).options(
            name=f"{self._token} {order.name} {order.life}",
            lifetime="detached",
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            max_restarts=0,
            max_concurrency=THREADS,
        )
        self._unplaced.add(order.life)
        self._actors[order.life] = actor.remote(msgspec.msgpack.encode(order))

    def look(self, life: str, acked: int) -> None:
        """Ask an actor."""
        reference = self._actors[life].look.remote(acked, LONG_POLL_S)
        self._asked[reference] = life

    def poll(self, timeout_s: float) -> list[Answer]:
        """Return the answers of actors; ClusterLostError if the connection is gone."""
        if not self._asked:
            return []
        self._require()
        asked = list(self._asked)
        ready, _ = self._ray.wait(asked, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready:
            ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=0, fetch_local=False)
        return [self._answer(reference, self._asked.pop(reference)) for reference in ready]

    def send(self, life: str, number: int, group: bool) -> None:
        """Signal the process of an actor."""
        if (actor := self._actors.get(life)) is not None:
            actor.send.remote(number, group)

    def kill(self, life: str) -> None:
        """End an actor and its process."""
        if (actor := self._actors.pop(life, None)) is not None:
            self._asked = {one: other for one, other in self._asked.items() if other != life}
            self._end(actor, asks=life not in self._unplaced)
            self._unplaced.discard(life)

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of each living node."""
        self._require()
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """Disconnect."""
        self._ray.shutdown()

    def _require(self) -> None:
        if not self._ray.is_initialized():
            raise ClusterLostError("the connection to the Ray cluster is lost")

    def _answer(self, reference: Any, life: str) -> Answer:
        try:
            state = msgspec.msgpack.decode(self._ray.get(reference, timeout=10), type=HostState)
            self._unplaced.discard(life)
            return Answer(life, state)
        except Exception as error:  # noqa: BLE001 - Ray raises errors of many kinds, also those of the host
            return Answer(life, error=reason_of(error))

    def _end(self, actor: Any, *, asks: bool = True) -> None:
        """Let an actor end its process, then kill it; one without a host is not asked, for it would not answer."""
        if asks:
            with suppress(Exception):
                self._ray.get(actor.close.remote(), timeout=1.0)
        with suppress(Exception):
            self._ray.kill(actor, no_restart=True)


def connect(address: str, namespace: str, code: Path | None, excludes: tuple[str, ...] = ()) -> Any:
    """Connect this process to a Ray cluster and return the module `ray`.

    Raises:
        PackageMissingError: Ray is not installed.
        MissingError: No cluster runs at the address.
    """
    try:
        import ray
    except ImportError:
        raise PackageMissingError("the package ray", install_remedy("ray")) from None
    environment: dict[str, Any] = {}
    if code is not None:
        environment = {"working_dir": str(code), "excludes": [*EXCLUDES, *excludes]}
    is_main = threading.current_thread() is threading.main_thread()
    assert not is_main, "Ray would install its signal handlers: connect in another thread"
    try:
        ray.init(
            address=address or "auto",
            namespace=namespace,
            runtime_env=environment,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or "this host"
        raise MissingError(
            f"a Ray cluster at {where}",
            "start one with `ray start --head`, and name its address in cluster.address if it is of another host "
            f"({cut(str(error)).splitlines()[0]})",
        ) from error
    return ray


def reason_of(error: BaseException) -> str:
    """Return in one line why an actor is lost."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "No module named 'rolloutmq" in str(error):
        return "its host has no RolloutMQ; install the same version on every host of the cluster"
    told = next((line for line in reversed(lines) if "node" in line.lower() or "Error" in line), "")
    return cut(f"lost with its host: {told or (lines[0] if lines else type(error).__name__)}")


def head_address(ray: Any) -> str:
    """Return the address by which the nodes of the cluster reach this host."""
    return str(ray.util.get_node_ip_address())


def described(nodes: list[Mapping[str, float]]) -> str:
    """Return the size of a cluster in a few words."""
    cpus, gpus = (sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
    return f"{len(nodes)} nodes, {cpus:g} CPU" + (f", {gpus:g} GPU" if gpus else "")
