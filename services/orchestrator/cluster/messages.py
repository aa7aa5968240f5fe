"""The messages between the orchestrator and the cluster service of a run, and between that service and the hosts.

Both ends of the private socket are of one run and one version. Each message is a frame: its length in four bytes, then
MessagePack. All orders are idempotent, so an orchestrator repeats them after each connection: a life is named by a
random id, is started once, and is told until it is released.

    orchestrator -> service     Start, Send, Release, Demand
    service -> orchestrator     Lives once after each connection, then a LifeState at each change; Nodes
"""

import struct
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeVar

import msgspec

from rolloutmq.schemas.errors import MalformedError

RESERVATION: Final = "reservation"
"""Name of the life that holds resources of the run's own host: no process of the run has it."""
FRAME_LIMIT_BYTES: Final = 8 << 20
"""Largest frame: the states of ten thousand lives."""
LOG_PART_BYTES: Final = 64 << 10
"""Most bytes of output in one answer of a host."""
TEXT_CHARS: Final = 2000
"""Longest text of a state."""
_LENGTH: Final = struct.Struct("!I")
_T = TypeVar("_T")


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program of somebody else's. Texts may have `RUN_DIR` in them, for the directory of its host.

    Attributes:
        argv: Program and arguments; a relative path is of the directory of the configuration.
        variables: Variables added to the environment of its host.
    """

    argv: tuple[str, ...]
    variables: dict[str, str]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a process somewhere; nothing if this life is known.

    Attributes:
        life: Random name of the life.
        name: Name of the process, as in its spec.
        env: Its environment, or `PLACED` for an engine, which tells its resources.
        words: Arguments of `launch.service_process`, without the run directory: that is the host's own.
        program: What runs in place of that.
    """

    life: str
    name: str
    env: str
    words: tuple[str, ...] = ()
    program: Program | None = None


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send a signal to a process, or to its whole group. One without a host yet is not started any more."""

    life: str
    number: int
    group: bool


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget a life; a process that still runs is killed."""

    life: str


class Demand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the control law wants now, running workers included; it replaces the demand of before.

    Attributes:
        workers: Number of workers, by environment, and of engines by `PLACED`.
        avoid: Ids of nodes that get no new process.
    """

    workers: dict[str, int]
    avoid: tuple[str, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A living node of the cluster.

    Attributes:
        id: Its id on the cluster.
        host: Name or address of its host.
        total, free: Resources by their names, and what nobody has of them.
        draining: The cluster is about to remove it.
    """

    id: str
    host: str = ""
    total: dict[str, float] = {}
    free: dict[str, float] = {}
    draining: bool = False


class Nodes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The living nodes of the cluster; told once a second and after each connection."""

    nodes: tuple[Node, ...]


class LifeState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is known of a life.

    Attributes:
        life, name: As started; the name is told by the host after a restart of the service.
        node: Id of its node; empty while the cluster has found none.
        host: Name of its host; empty while its process has not started there.
        pid, start_ticks, boot_id: Identity of the process on that host.
        waits_for: What a life without a process waits for.
        over: The process has ended, or never will be.
        code: Its exit code, or minus the signal; None if it is unknown.
        why: How it ended where the code does not tell.
    """

    life: str
    name: str
    node: str = ""
    host: str = ""
    pid: int = 0
    start_ticks: int = 0
    boot_id: str = ""
    waits_for: str = ""
    over: bool = False
    code: int | None = None
    why: str = ""


class Lives(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every life that the service knows: all that are on the cluster, and the ended ones that were not released."""

    lives: tuple[LifeState, ...]


Order = Start | Send | Release | Demand
Report = Lives | LifeState | Nodes


class HostOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is to run, and how it reaches the run.

    Attributes:
        life, name, words, program: As in `Start`.
        token: Run token, first half of the marker.
        run: Name of the run.
        version: Version of this package in the run; the host must have the same.
        addresses: Addresses of the broker.
        key: Contents of the file of its key; empty for a run without keys.
        lease_s: Silence of the run after which the host ends the process.
        term_grace_s: Time between SIGTERM and SIGKILL then.
        autoscale: The run asks the autoscaler of the cluster for nodes.
        engine: It is an inference server: it gets a relay beside it, and the broker its heartbeats.
    """

    life: str
    name: str
    words: tuple[str, ...] = ()
    program: Program | None = None
    token: str
    run: str
    version: str
    addresses: tuple[str, ...]
    key: bytes = b""
    lease_s: float = 60.0
    term_grace_s: float = 5.0
    autoscale: bool = False
    engine: bool = False


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a host: what has become of its process, and the next part of its output.

    Attributes:
        state: As told to the orchestrator.
        offset: Position of `output` in everything that the process has written.
        output: At most `LOG_PART_BYTES`.
        more: Further output is ready.
    """

    state: LifeState
    offset: int
    output: bytes = b""
    more: bool = False


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster is to keep of this host.

    Attributes:
        namespace, token: Names of the run on the cluster.
        cpus, gpus: What to keep.
        lease_s: Silence of the run after which it is given back.
        timeout_s: Longest wait for others to leave it.
    """

    namespace: str
    token: str
    cpus: float
    gpus: float
    lease_s: float
    timeout_s: float


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What was kept: the ids of the GPUs; or why it could not be."""

    problem: str = ""
    gpus: tuple[str, ...] = ()


_ORDERS: Final = msgspec.msgpack.Decoder(Order)
_REPORTS: Final = msgspec.msgpack.Decoder(Report)


def own_version() -> str:
    """Return the installed version of this package; `0+unknown` for a checkout that is on the path alone."""
    try:
        return version("rolloutmq")
    except PackageNotFoundError:
        return "0+unknown"


def framed(message: Order | Report) -> bytes:
    """Return a message as a frame."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Splits a stream into the messages of one side. Pure.

    Args:
        orders: The messages are those of an orchestrator.
    """

    def __init__(self, *, orders: bool) -> None:
        self._decoder: msgspec.msgpack.Decoder[Order] | msgspec.msgpack.Decoder[Report] = (
            _ORDERS if orders else _REPORTS
        )
        self._held = bytearray()

    def take(self, data: bytes) -> list[Order | Report]:
        """Return the messages that are complete with these bytes.

        Raises:
            MalformedError: The stream is not of this protocol.
        """
        self._held += data
        found: list[Order | Report] = []
        while len(self._held) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._held)
            if size > FRAME_LIMIT_BYTES:
                raise MalformedError(f"a frame of the cluster service has {size} bytes, too many")
            if len(self._held) < _LENGTH.size + size:
                break
            try:
                found.append(self._decoder.decode(self._held[_LENGTH.size : _LENGTH.size + size]))
            except msgspec.MsgspecError as error:
                raise MalformedError(f"a frame of the cluster service does not decode: {error}") from None
            del self._held[: _LENGTH.size + size]
        return found


def cut(text: str) -> str:
    """Return a text of at most `TEXT_CHARS`, its end: the last line of an error tells most."""
    return text if len(text) <= TEXT_CHARS else f"...{text[-TEXT_CHARS:]}"
