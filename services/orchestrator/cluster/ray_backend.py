"""Ray as the cluster of a run: one detached actor for each life, named in a namespace of the run.

An actor outlives the connection that made it, so the next cluster service finds it by its name, `TOKEN NAME LIFE`. It
is never restarted by Ray: the orchestrator decides on restarts. Ray decides where an actor runs, by its resources.

Ray is imported here alone, in the process of the cluster service and in the actors.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.errors import ConfigError, MissingError, PackageMissingError, install_remedy
from rolloutmq.schemas.printable import error_line
from rolloutmq.services.orchestrator.cluster.backend import Answer, ClusterLostError
from rolloutmq.services.orchestrator.cluster.capacity.request import AutoscalerRequests, Bundles
from rolloutmq.services.orchestrator.cluster.messages import (
    RESERVATION,
    Hold,
    HostOrder,
    HostState,
    LifeState,
    Node,
    cut,
)
from rolloutmq.services.orchestrator.cluster.resources import CPU, GPU, Need, told

logger = logging.getLogger(__name__)

LONG_POLL_S: Final = 2.0
"""Longest time that a host waits for news before it answers; it renews the lease."""
THREADS: Final = 4
"""Calls that an actor takes at once: a signal does not wait for a look."""
CLOSE_S: Final = 2.0
"""Longest wait for actors that end their processes."""
NODES_S: Final = 5.0
"""Longest look at the nodes."""
FIRST_LEASE_S: Final = 120.0
"""Shortest lease of what a run holds of its host, before its cluster service has asked first: services start slowly."""
NODE_ID: Final = "ray.io/node-id"
"""Label of each node with its id."""
UNKNOWN: Final = "unknown"
"""Node of an actor of which Ray does not tell where it is."""
NO_TRACE: Final = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
"""Keeps Ray from printing the stacks of a process that gets SIGTERM, which is how a run ends."""
EXCLUDES: Final = ("runs/", ".git/", ".venv*/", "__pycache__/", "*.pyc", "*.key")
"""What is not sent along with the code of environments: private keys are for no other host."""


class RayActor:
    """The actor of one life, on its host. Ray makes it; all it does is in `HostProcess`."""

    def __init__(self, order: bytes) -> None:
        from rolloutmq.services.orchestrator.cluster.host_process import HostProcess

        told = msgspec.msgpack.decode(order, type=HostOrder)
        self._process = HostProcess(told, lambda: leave(withdraws=told.autoscale))

    def look(self, acked: int, wait_s: float) -> bytes:
        """Return the state and output of the process, a `HostState`."""
        return msgspec.msgpack.encode(self._process.look(acked, wait_s))

    def send(self, number: int, group: bool) -> None:
        """Signal the process."""
        self._process.send(number, group)

    def close(self) -> None:
        """Kill the process and remove its files."""
        self._process.close()


class RayHolder:
    """An actor that holds resources of its node for processes that Ray does not run; it ends with its lease."""

    def __init__(self, life: str, lease_s: float) -> None:
        self._state = LifeState(life=life, name=RESERVATION)
        self._lease_s = max(lease_s, FIRST_LEASE_S)
        self._next_lease_s = lease_s
        self._asked_at = time.monotonic()
        threading.Thread(target=self._wait, name="lease", daemon=True).start()

    def gpus(self) -> list[str]:
        """Return the ids of its GPUs, as in `CUDA_VISIBLE_DEVICES`."""
        import ray

        return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get(GPU, ())]

    def look(self, acked: int, wait_s: float) -> bytes:
        """Renew the lease, and return the state after a while."""
        self._asked_at, self._lease_s = time.monotonic(), self._next_lease_s
        time.sleep(wait_s)
        return msgspec.msgpack.encode(HostState(state=self._state, offset=max(0, acked)))

    def close(self) -> None:
        """Do nothing: there is no process to end."""

    def _wait(self) -> None:
        while time.monotonic() - self._asked_at <= self._lease_s:
            time.sleep(1.0)
        leave(withdraws=False)


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
        self._gcs = gcs_of(self._ray)
        self._nodes: tuple[Node, ...] = ()
        self._unseen = LogThrottle()
        self._autoscaler = AutoscalerRequests(request_nodes)

    def found(self) -> list[tuple[str, str]]:
        """Return life and name of the run's actors; kill those of an earlier run."""
        lives, earlier = [], []
        for name in self._ray.util.list_named_actors():
            token, _, rest = name.partition(" ")
            process, _, life = rest.partition(" ")
            try:
                actor = self._ray.get_actor(name)
            except ValueError:  # it has just died
                continue
            if token != self._token:
                logger.warning("ending an actor of an earlier run name=%s", process)
                earlier.append(actor)
                continue
            self._actors[life] = actor
            lives.append((life, process))
        self._end(earlier, earlier)
        return lives

    def start(self, order: HostOrder, need: Need, avoid: Sequence[str] = ()) -> None:
        """Make the actor of a life."""
        actor = self._ray.remote(RayActor).options(
            name=f"{self._token} {order.name} {order.life}",
            lifetime="detached",
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            max_restarts=0,
            max_concurrency=THREADS,
            **({"label_selector": without(avoid)} if avoid else {}),
        )
        self._unplaced.add(order.life)
        self._actors[order.life] = actor.remote(msgspec.msgpack.encode(order))

    def hold(self, wanted: Hold) -> tuple[str, ...]:
        """Hold resources of this node for the run; return the ids of the GPUs. Blocks, at most for the wait.

        Raises:
            ConfigError: The node is too small, or others do not leave it in time.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        need, node, life = Need(wanted.cpus, wanted.gpus), self._own_node(), secrets.token_hex(8)
        key, remedy = "cluster.reserve_cpus", "; reserve less, or start Ray on this host with more"
        if not need.fits(node.total):
            raise ConfigError(key, f"{need} are too much for this host, a node of {told(node.total)}{remedy}")
        actor = (
            self._ray.remote(RayHolder)
            .options(
                name=f"{self._token} {RESERVATION} {life}",
                lifetime="detached",
                num_cpus=need.cpus,
                num_gpus=need.gpus,
                max_restarts=0,
                max_concurrency=THREADS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote(life, wanted.lease_s)
        )
        try:
            return tuple(self._ray.get(actor.gpus.remote(), timeout=wanted.timeout_s))
        except Exception as error:
            self._ray.kill(actor, no_restart=True)
            free = told(self._own_node().free)
            raise ConfigError(
                key,
                f"this host has not had room for {need} for {wanted.timeout_s:g} s: {free} are free "
                f"({type(error).__name__}); end what uses the others, or reserve less",
            ) from error

    def _own_node(self) -> Node:
        own = self._ray.get_runtime_context().get_node_id()
        found = next((node for node in nodes_of(self._gcs) if node.id == own), None)
        return Node(id=own) if found is None else found

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
        self.kill_all([life])

    def kill_all(self, lives: Collection[str]) -> None:
        """End actors and their processes, all at once."""
        known = {life: self._actors.pop(life) for life in lives if life in self._actors}
        self._asked = {one: life for one, life in self._asked.items() if life not in known}
        self._end(known.values(), [actor for life, actor in known.items() if life not in self._unplaced])
        self._unplaced.difference_update(known)

    def placed(self, lives: Collection[str]) -> dict[str, str]:
        """Return the nodes of actors: one has a node before it has been started there."""
        found = {}
        for life in lives:
            if (actor := self._actors.get(life)) is not None and (node := node_of(self._ray, actor)):
                found[life] = node
        return found

    def nodes(self) -> tuple[Node, ...]:
        """Return the living nodes, those of the last look if there is no answer."""
        self._require()
        try:
            self._nodes = nodes_of(self._gcs)
        except Exception as error:  # noqa: BLE001 - Ray raises errors of many kinds
            if self._unseen.is_due(text := error_line(error), time.monotonic()):
                logger.warning("nodes not seen error=%s", cut(text))
        return self._nodes

    def request(self, needs: Mapping[Need, int], avoid: Sequence[str] = ()) -> None:
        """Ask Ray's autoscaler for room, in another thread."""
        bundles = tuple(need.amounts for need, count in needs.items() if need.amounts for _ in range(count))
        self._autoscaler.want(bundles, avoid)

    def close(self) -> None:
        """Disconnect, once the last request to the autoscaler was made or has taken too long."""
        self._autoscaler.settle()
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

    def _end(self, actors: Iterable[Any], asked: Iterable[Any]) -> None:
        """Let actors end their processes, then kill them; those without a host are not asked: they do not answer."""
        closing = []
        for actor in asked:
            with suppress(Exception):
                closing.append(actor.close.remote())
        if closing:
            with suppress(Exception):
                self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S, fetch_local=False)
        for actor in actors:
            with suppress(Exception):
                self._ray.kill(actor, no_restart=True)


def connect(address: str, namespace: str, code: Path | None, excludes: tuple[str, ...] = ()) -> Any:
    """Connect this process to a Ray cluster and return the module `ray`.

    Raises:
        PackageMissingError: Ray is not installed.
        MissingError: No cluster runs at the address.
    """
    os.environ.setdefault(NO_TRACE, "1")
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


def gcs_of(ray: Any) -> Any:
    """Return a client of the cluster's control service, which knows what is free on each node."""
    from ray._raylet import GcsClient

    return GcsClient(ray.get_runtime_context().gcs_address)


def nodes_of(gcs: Any) -> tuple[Node, ...]:
    """Return the living nodes.

    Raises:
        Exception: The control service does not answer, or in another protocol.
    """
    from ray.core.generated import autoscaler_pb2 as states

    reply = states.GetClusterResourceStateReply()
    reply.ParseFromString(gcs.get_cluster_resource_state(timeout_s=NODES_S))
    return tuple(
        Node(
            id=node.node_id.hex(),
            host=node.node_ip_address,
            total=counted(node.total_resources),
            free=counted(node.available_resources),
            draining=node.status == states.DRAINING,
        )
        for node in reply.cluster_resource_state.node_states
        if node.status != states.DEAD
    )


def counted(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that a process of a run may need."""
    return {name: float(resources[name]) for name in (CPU, GPU) if name in resources}


def node_of(ray: Any, actor: Any) -> str:
    """Return the node that was found for an actor; empty before, and `UNKNOWN` where Ray does not tell.

    An actor that waits has the node that is asked for room, but no process there, and so no port.
    """
    try:
        address = ray._private.state.actors(actor._actor_id.hex())["Address"]
        return str(address["NodeID"]) if address["Port"] > 0 else ""
    except Exception:  # noqa: BLE001 - nobody may take it for one without a node
        return UNKNOWN


def without(avoid: Sequence[str]) -> dict[str, str]:
    """Return the selector of all nodes but these."""
    return {NODE_ID: f"!in({','.join(avoid)})"}


def request_nodes(bundles: Bundles, avoid: Sequence[str] = ()) -> None:
    """Ask the autoscaler of the connected cluster for nodes on which all of these fit together. Blocks."""
    from ray.autoscaler.sdk import request_resources

    selectors = [without(avoid)] * len(bundles) if avoid else None
    request_resources(bundles=[dict(one) for one in bundles], bundle_label_selectors=selectors)


def leave(*, withdraws: bool) -> None:
    """End an actor whose run is silent; nobody else withdraws what the run has asked the autoscaler for."""
    if withdraws:
        requests = AutoscalerRequests(request_nodes)
        requests.want(())
        requests.settle()
    os._exit(0)
