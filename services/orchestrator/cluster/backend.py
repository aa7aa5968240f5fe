"""What the cluster service asks of the software of a cluster."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.services.orchestrator.cluster.messages import HostOrder, HostState, Node
from rolloutmq.services.orchestrator.cluster.resources import Need


class ClusterLostError(RolloutMQError):
    """The cluster does not answer; the service ends, and its next life connects again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a question to the host of a life.

    Attributes:
        life: The life.
        told: Answer of the host; None if it is lost.
        error: Why it is lost.
    """

    life: str
    told: HostState | None = None
    error: str = ""


class Backend(Protocol):
    """One connection to a cluster. Every method but `poll` returns soon, and all are called from one thread.

    A life is kept by the cluster, not by this connection: it goes on without one for the lease of its order.
    """

    def found(self) -> list[tuple[str, str]]:
        """Return life and name of what an earlier connection of this run started; end what an earlier run did."""
        ...

    def start(self, order: HostOrder, need: Need, avoid: Sequence[str] = ()) -> None:
        """Let the cluster find a host for a life, but on no node to avoid; the first answer to `look` tells of it."""
        ...

    def placed(self, lives: Collection[str]) -> Mapping[str, str]:
        """Return the node of each of these lives that has one; its process may not have started yet."""
        ...

    def look(self, life: str, acked: int) -> None:
        """Ask the host of a life for its state and its output from this position on; `poll` returns the answer."""
        ...

    def poll(self, timeout_s: float) -> list[Answer]:
        """Return the answers that have arrived; wait for the first one at most so long."""
        ...

    def send(self, life: str, number: int, group: bool) -> None:
        """Signal the process of a life, as far as its host can be reached."""
        ...

    def kill(self, life: str) -> None:
        """Remove a life from the cluster with all it runs; nothing if it is gone."""
        ...

    def kill_all(self, lives: Collection[str]) -> None:
        """Remove several lives together; blocks for a few seconds at most."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """Return the living nodes."""
        ...

    def request(self, needs: Mapping[Need, int], avoid: Sequence[str] = ()) -> None:
        """Ask the cluster to grow until so many processes fit, those that run included; it replaces the last request.

        Returns at once; a failure is logged.

        Args:
            needs: Number of processes, by what one needs; none withdraws the request.
            avoid: Nodes that do not count.
        """
        ...

    def close(self) -> None:
        """End the connection; the lives go on, and so does the last request."""
        ...
