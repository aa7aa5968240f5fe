"""Lines of the files that processes of a run leave for each other and for later."""

import msgspec

from rolloutmq.schemas.envelope import Count, PolicyVersion, Split
from rolloutmq.schemas.hardware import Cause, GpuStanding
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.telemetry import GpuSample


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """`endpoints.json`: addresses to connect to, and the broker that is bound to them."""

    ingest: str
    serve: str
    events: str
    publish: str
    pid: int
    epoch: int


class InferenceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`inference.json`, `inference-1.json`, ...: where an engine serves the policy, and how it does.

    Written anew about once a second; an address whose `number` stands still is that of an engine that died or hangs.
    """

    url: str
    """Base address, without `/v1`."""
    pid: int
    name: str = "inference"
    number: Count = 0
    """Grows by one with each writing."""
    at: float = 0.0
    """Wall clock of the writing."""
    in_hand: Count = 0
    """Requests that it has and has not answered."""
    busy: float = 0.0
    """Part of the last seconds, 0 to 1, in which it generated."""
    draining: bool = False
    """It answers what it has in hand and takes nothing new."""
    trouble: str = ""
    """Why it can sample nothing now, in the word that its `/health` says; empty if it can."""


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`gateway.json`: where the HTTP interface is."""

    url: str
    pid: int


class WeightsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`weights.json`: the shared segment of the weights, and the nonce that it must carry."""

    path: str
    nonce: str


class DiskAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`weights.json` where weights are published as files: which version is the newest."""

    directory: str
    """Name of the version's directory, below `weights/` beside this file. Each write has another."""
    version: PolicyVersion
    manifest: str
    """Sha256 of its manifest.json."""
    tensors: int
    """CRC32C of its file of tensors."""
    run: str
    """Nonce of the life that wrote it."""


class SentAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`weights.json` where weights are sent to vLLM: who sends them, and what has arrived."""

    sender: tuple[int, int, int]
    """Process id of the trainer, its start in ticks, and the inode of its pid namespace."""
    version: PolicyVersion | None = None
    """Of the last set that vLLM took whole; None if it has none of this trainer."""
    waits: str = ""
    """Why the trainer waits for a vLLM to take them before it pulls again, if it does."""


class VllmAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`vllm.json`: where a vLLM is that waits for weights to be sent to it."""

    url: str
    """`unix:/path` of its socket."""
    nonce: str
    """Another for each vLLM that is started."""


class AckedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`acks/<worker>.jsonl`: one group that the broker accepted, and what it is like.

    Lines of earlier versions end with `at`; a group has at least one sequence, so that `sequences` tells them apart.
    """

    group_id: str
    session: int
    seq: int
    at: float
    env: str = ""
    split: Split = Split.TRAIN
    sequences: Count = 0
    tokens: Count = 0
    """Of all sequences together."""
    duration_s: float | None = None
    """Wall-clock seconds of the rollout; None if it was not told, or is no number."""
    reward: float | None = None
    """Mean raw score."""


class SettledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`trained.jsonl`: one batch that the trainer settled.

    A line is written before the broker is told. `version` is the policy after the step; a batch without a signal is
    no step and repeats the version. A trainer that resumes first writes a line with `resumed=True`: every earlier
    line with a higher step is void, since the weights that it led to are gone.
    """

    at: float
    version: PolicyVersion
    trained: tuple[str, ...] = ()
    filtered: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    staleness: tuple[int, ...] = ()
    """Of each trained group, in policy versions."""
    rewards: tuple[float, ...] = ()
    """Mean raw score of each group, trained then filtered."""
    resumed: bool = False
    rewound: bool = False


class DroppedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`dropped.jsonl`: one group that left the queue without being trained."""

    at: float
    group_id: str
    state: str
    """`expired`, `dead` or `discarded`."""
    reason: str


class RunHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A lock file: who holds the lock, for the one that is refused."""

    name: str
    pid: int
    since: float
    """Wall clock."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the orchestrator sees it. Times are of CLOCK_MONOTONIC: one clock for all processes of a boot."""

    worker: str
    env: str
    phase: str
    """`waiting` for its next start, `running`, `stopping`, or `fatal`: given up for good."""
    since: float
    """When the phase began."""
    pid: int = 0
    """0 if no process lives."""
    started: float | None = None
    """When the process was started, by whoever did."""
    due: float | None = None
    """When it is started again, if it waits for that."""
    crashes: int = 0
    """In a row, each soon after its start."""
    restarts: int = 0
    reason: str = ""
    """Why it is in this phase; how its last life ended."""
    last_lines: tuple[str, ...] = ()
    """End of its log, if it crashed and does not run."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers an environment shall have, and why."""

    env: str
    target: int
    current: int
    reason: str


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """`supervision.json`: the workers of a run as its orchestrator sees them, but for those that ended in order."""

    orchestrator: ProcessIdentity
    targets: tuple[Target, ...] = ()
    workers: tuple[WorkerRecord, ...] = ()


class Dismissed(msgspec.Struct, frozen=True):
    """An event that an operator knows of and does not want the GPU cordoned for."""

    cause: Cause
    mark: str


class GpuRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU in `gpus.json`.

    Attributes:
        standing: As it was last published.
        automatic: Causes for which it is cordoned without having been asked, with their marks and reasons.
        manual: Reason of the operator's cordon, or None.
        dismissed: See `Dismissed`.
        level: How often its hold-off has doubled.
        relapsing: It was uncordoned before, so that another cordon is a relapse.
        sample: The last one.
    """

    standing: GpuStanding
    automatic: dict[Cause, tuple[str, str]] = {}
    manual: str | None = None
    dismissed: tuple[Dismissed, ...] = ()
    level: Count = 0
    relapsing: bool = False
    sample: GpuSample | None = None


class GpuBook(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus.json`: for a restart of the orchestrator, and for whoever asks how the GPUs are.

    Attributes:
        limits: Environment to the reason why it has fewer workers than it should; none if they all fit.
    """

    gpus: tuple[GpuRecord, ...] = ()
    limits: dict[str, str] = {}
