"""The files of a run directory: their names and the structure of their contents.

config.json          resolved configuration                             written by the launcher
hub.json             models and data sets of a hub, with commits         launcher
run.json             owner of the run directory (ProcessIdentity)       launcher
lives.json           start and end of each life of the run (list of Life)    launcher; without one the broker
identity.json        id of the run, the same in all its lives             broker; on another host whoever joins
ending.json          what the end of the run waits for                  launcher, while an end lasts
crashes.json         services that crashed in a row, and why             launcher, while it lives
processes.json       live processes (list of ProcessIdentity)           launcher; workers.json: orchestrator
engines.json         live engines of the orchestrator                   orchestrator
supervision.json     state of each worker                               orchestrator
gpus.json            each GPU: cordons, holders, last sample            orchestrator
endpoints.json       addresses of the broker's sockets                  broker, once they are bound
inference.json       address of the first engine                        inference server, once it is ready
inference-1.json ... addresses of further engines                       each engine, while it serves
teacher.json         address of the teacher                             teacher, once it is ready
connection.json      the run's addresses and key, in the directory of another host    whoever joins
http_token           token for the run's HTTP servers, if it has keys   launcher; on another host whoever joins
http_tokens.json     hashes of the tokens that an engine accepts, on another host    whoever joins
http_refused.json    refused HTTP requests of each key                 the run's HTTP servers
tls_ca.pem           certificates that the run's clients trust, on another host    whoever joins
gateway.json         address of the HTTP interface                      gateway, once it listens
registrations.json   trainer, environments and step of the gateway      gateway
doubts.log           posts that may not have been answered              gateway
weights.json         address of the shared weights                      trainer
weights/             weight versions, with the backend `disk`           trainer
stream.json          address of the stream of weights                   relay
relay.json           what a relay of received weights has, and waits for    relay
stage.json           address of an unfinished transfer of weights       relay
vllm.json            address of vLLM, with the backend `vllm_http`      inference server
ranks.json           rendezvous address of several ranks                trainer
model/               configuration and tokenizer of the policy          trainer
checkpoints/         step-000050/ ...                                   trainer
trained.jsonl        settled batches, with the ids of their groups      trainer
acks/<worker>.jsonl  acked groups                                       each producer
evaluations.jsonl    points of the evaluation, and postponed ones       whoever evaluates
evaluation.json      tasks of the point under way; evaluation.lock       the same
settled.jsonl        settled batches, as the broker knows them           broker
dropped.jsonl        groups that left the queue untrained               broker
clocks.jsonl         clocks of the workers of other hosts               broker
owners.jsonl         names of producers and consumers, and their keys   broker, if it listens with keys
saved.rmq            final state with its groups, at durability `memory`    broker
journal/             groups-00000001.rmq ..., events-00000001.rmq ..., quarantine/  broker
dead/                one file for each dead letter                      broker
ratings/             latest ratings of each ensemble of raters          each worker, under a lock
metrics.jsonl        every published event                              telemetry
trackers/            files of experiment trackers; NAME.json has the id of their run    telemetry's sinks
curriculum.json      progress of each curriculum                        curriculum
curriculum/          state and events of each curriculum                curriculum
decisions.jsonl      autoscaling decisions, with their inputs           orchestrator
signs/<worker>.json   sign of life, every second, on another host    each worker
failures/<environment>.json   last exception of the environment's code, with its frames    each worker
hangs/<worker>.json, .stack   environment's code that holds the worker's event loop now    each worker
logs/<name>.log      output of each process; rotated to .log.1, .log.2, ..., newest first
sockets/             ipc endpoints, mode 0700
spools/              unacked groups of ended producers                  each producer
summary.json, report.png                                                launcher, at the end
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rolloutmq.schemas.process import ProcessIdentity, Step
from rolloutmq.schemas.wire.envelope import Count, PolicyVersion, Split
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuSample

VERSIONS: Final = "weights"
"""Directory of the weight versions, beside the file that names the newest."""


class RunLayout:
    """Paths in one run directory. Creates nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.json"
        self.hub = root / "hub.json"
        self.owner = root / "run.json"
        self.lives = root / "lives.json"
        self.identity = root / "identity.json"
        self.ending = root / "ending.json"
        self.crashes = root / "crashes.json"
        self.processes = root / "processes.json"
        self.workers = root / "workers.json"
        self.engines = root / "engines.json"
        self.supervision = root / "supervision.json"
        self.gpus = root / "gpus.json"
        self.endpoints = root / "endpoints.json"
        self.inference = root / "inference.json"
        self.teacher = root / "teacher.json"
        self.connection = root / "connection.json"
        self.cluster_key = root / "cluster.key"
        self.cluster_engine_key = root / "cluster-engine.key"
        self.http_token = root / "http_token"
        self.http_tokens = root / "http_tokens.json"
        self.http_refused = root / "http_refused.json"
        self.tls_ca = root / "tls_ca.pem"
        self.gateway = root / "gateway.json"
        self.registrations = root / "registrations.json"
        self.doubts = root / "doubts.log"
        self.weights = root / "weights.json"
        self.versions = root / VERSIONS
        self.stream = root / "stream.json"
        self.relay = root / "relay.json"
        self.stage = root / "stage.json"
        self.vllm = root / "vllm.json"
        self.ranks = root / "ranks.json"
        self.model = root / "model"
        self.checkpoints = root / "checkpoints"
        self.trained = root / "trained.jsonl"
        self.acks = root / "acks"
        self.evaluations = root / "evaluations.jsonl"
        self.evaluation = root / "evaluation.json"
        self.evaluation_lock = root / "evaluation.lock"
        self.settled = root / "settled.jsonl"
        self.dropped = root / "dropped.jsonl"
        self.clocks = root / "clocks.jsonl"
        self.owners = root / "owners.jsonl"
        self.saved = root / "saved.rmq"
        self.journal = root / "journal"
        self.dead = root / "dead"
        self.ratings = root / "ratings"
        self.metrics = root / "metrics.jsonl"
        self.trackers = root / "trackers"
        self.curriculum = root / "curriculum.json"
        self.curricula = root / "curriculum"
        self.decisions = root / "decisions.jsonl"
        self.failures = root / "failures"
        self.hangs = root / "hangs"
        self.signs = root / "signs"
        self.logs = root / "logs"
        self.sockets = root / "sockets"
        self.cluster_socket = self.sockets / "cluster"
        self.spools = root / "spools"
        self.summary = root / "summary.json"
        self.report = root / "report.png"

    def ack_log(self, producer: str) -> Path:
        """Return the ack log of a producer."""
        return self.acks / f"{producer}.jsonl"

    def engine(self, name: str) -> Path:
        """Return the address file of an engine; the first is called `inference`."""
        return self.root / f"{name}.json"

    def failure(self, env: str) -> Path:
        """Return the file with the last exception of an environment's code."""
        return self.failures / f"{env}.json"

    def hang(self, worker: str) -> Path:
        """Return the file with the code that holds the event loop of a worker now."""
        return self.hangs / f"{worker}.json"

    def stack(self, worker: str) -> Path:
        """Return the file with the stacks of a worker whose threads cannot run either."""
        return self.hangs / f"{worker}.stack"

    def sign(self, worker: str) -> Path:
        """Return the file with the sign of life of a worker, for the command on its host that started it."""
        return self.signs / f"{worker}.json"

    def own_config(self, name: str) -> Path:
        """Return the configuration of one command that joined, in the directory of its host for the run."""
        return self.root / f"config-{name}.json"

    def log(self, process: str) -> Path:
        """Return the log of a process."""
        return self.logs / f"{process}.log"


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """`signs/WORKER.json`, a sign of life; the address file of an engine reads as one, too."""

    pid: int
    state: str = "ready"
    """State of the worker, as in its heartbeats."""
    answered: bool = True
    """The broker has answered its last heartbeat."""
    draining: bool = False


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """`hub.json`, in a list: what the run uses of a hub, at the commit that it keeps when resumed."""

    key: str
    """Section that names it: `model`, `teacher` or `environment.NAME.dataset`."""
    name: str
    """Organization and name of a model or data set."""
    revision: str
    """Branch, tag or commit of the configuration; empty for the main branch."""
    commit: str
    """Commit that the revision was when the run started."""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """`endpoints.json`: addresses of the broker's sockets, and the broker's pid and epoch.

    Attributes:
        ingest, serve, events, publish: Addresses of the sockets.
        pid: The broker's process; 0 if it is unknown.
        epoch: The broker's epoch.
        listen: Bound addresses of `broker.listen`: serve, ingest, events, publish.
        insecure: `listen` asks for no key.
        key: Path of the key file that clients of these addresses need; empty for none.
        run_id: Id of the run; clients wait while the broker there serves another one. Empty if it is unknown.
    """

    ingest: str
    serve: str
    events: str
    publish: str
    pid: int
    epoch: int
    listen: tuple[str, ...] = ()
    insecure: bool = False
    key: str = ""
    run_id: str = ""


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`identity.json`: which run has its files in this directory."""

    run_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """Random, made with the run; the same for all its lives, resumed ones included."""


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """`connection.json`: how this host reaches a run of another one. The directory is this host's own."""

    addresses: tuple[str, ...]
    """Addresses of `serve`, the first one first: of one broker, which may be reached by several or move."""
    key: str = ""
    """File with the key, on this host; empty without one."""


class InferenceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`inference.json`, `inference-1.json`, ...: address, load and health of an engine.

    The engine rewrites it about once a second; if `number` does not change, the engine is dead or hangs.
    """

    url: str
    """Base address, without `/v1`."""
    pid: int
    name: str = "inference"
    number: Count = 0
    """Grows by one with each write."""
    at: float = 0.0
    """Time of the write, wall-clock seconds."""
    in_hand: Count = 0
    """Number of unanswered requests."""
    busy: float = 0.0
    """Fraction of the last seconds, 0 to 1, in which it generated."""
    draining: bool = False
    """It finishes its requests and accepts no new ones."""
    trouble: str = ""
    """Reason why it cannot sample now, as in its `/health`; empty if it can."""
    network: str = ""
    """Network of its host, see `own_network`: a `url` on loopback is for processes of the same network alone."""
    key: str = ""
    """Name of the key of an engine of another host: processes of the run's host send it a token for this key alone."""
    run_id: str = ""
    """Id of the run that it serves, as its directory had it when it started; empty if it had none."""
    version: PolicyVersion | None = None
    """Version of the weights that it samples with; None if it does not tell."""


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`gateway.json`: address of the HTTP interface."""

    url: str
    pid: int


class WeightsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`weights.json`: path and nonce of the shared segment of the weights."""

    path: str
    nonce: str


class DiskAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`weights.json` with the backend `disk`: the newest weight version."""

    directory: str
    """Name of the version's directory in `weights/` beside this file. Each write has a new one."""
    version: PolicyVersion
    manifest: str
    """SHA-256 of its manifest.json."""
    tensors: int
    """CRC32C of its tensor file."""
    run: str
    """Nonce of the trainer process that wrote it."""


class SentAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`weights.json` with the backend `vllm_http`: the sending trainer, and the version that arrived."""

    sender: tuple[int, int, int]
    """Process id of the trainer, its start in ticks, and the inode of its pid namespace."""
    version: PolicyVersion | None = None
    """Last version that vLLM received completely; None if it has none of this trainer."""
    waits: str = ""
    """Reason why the trainer waits for vLLM before it pulls again; empty if it does not."""


class StreamAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`stream.json`: where receivers of other hosts get the weights of this run directory."""

    host: str
    port: int
    secret: str
    """Hexadecimal; tickets are made of it. Who can read this file may have the weights."""
    sealed: bool
    """Whether the transfers are encrypted."""
    sender: tuple[int, int, int]
    """Process of the sender, as `SentAddress.sender`."""


class RelayState(msgspec.Struct, frozen=True, kw_only=True):
    """`relay.json`: a relay that receives weights."""

    number: int
    """Grows by one with each heartbeat."""
    version: PolicyVersion | None = None
    """Version of the weights; None before the first."""
    waits_for: str = ""
    """What it waits for; empty if it has all."""
    run_id: str = ""
    """Id of the run whose weights it has."""


class StagedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """`stage.json`: the segment in which a receiver collects the next version."""

    path: str
    nonce: str


class PostponedPoint(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_postponed", tag_field="kind"):
    """A line of `evaluations.jsonl`: a point in between that was due and did not begin."""

    at: float
    """Wall clock."""
    step: int
    """Optimizer step at which it was due; the point of `step // every`."""
    every: int
    """`evaluation.every`."""
    max_share: float | None = None
    """`evaluation.max_share` if the point would exceed it; None if the point before was still under way."""
    point_s: float = 0.0
    """Seconds that the point before took."""
    spent_s: float = 0.0
    """Seconds of all points before."""
    wall_s: float = 0.0
    """Seconds of the run until then."""


class EndNotice(msgspec.Struct, frozen=True):
    """`ending.json`: what the end of the run waits for, as one line."""

    text: str
    over: bool = False
    """Nothing of the run needs an engine or its weights any more: those of other hosts may end."""


class ServiceCrash(msgspec.Struct, frozen=True):
    """`crashes.json`: a list of these, the services that crashed and were not up for `orchestrator.stable_s` since."""

    name: str
    crashes: int
    """Crashes in a row."""
    at: float
    """Wall clock of the last one."""
    reason: str
    """How it ended."""


class OpenPoint(msgspec.Struct, frozen=True):
    """`evaluation.json`: the point of the evaluation under way."""

    id: str
    tasks: tuple[str, ...]
    waiter: tuple[int, int, int] | None = None
    """The trainer that waits for it, as `SentAddress.sender`; None if training goes on."""


class VllmAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`vllm.json`: address of a vLLM that receives weights from the trainer."""

    url: str
    """`unix:/path` of its socket."""
    nonce: str
    """New for each started vLLM."""


class AckedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`acks/<worker>.jsonl`: one acked group.

    Lines of earlier versions end with `at`. A group has at least one sequence, so `sequences` distinguishes them.
    """

    group_id: str
    session: int
    seq: int
    at: float
    env: str = ""
    split: Split = Split.TRAIN
    sequences: Count = 0
    tokens: Count = 0
    """Tokens of all sequences."""
    duration_s: float | None = None
    """Wall-clock seconds of the rollout; None if unknown or not a number."""
    reward: float | None = None
    """Mean score."""


class SettledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`trained.jsonl` and `settled.jsonl`: one settled batch.

    The shipped trainer writes a line of `trained.jsonl` before it settles the batch, the broker one of `settled.jsonl`
    once the settlement is durable. `version` is the policy after the step; a batch without a learning signal is no step
    and repeats the version. When a trainer resumes, a line with `resumed=True` voids every earlier line with a higher
    step, because those weights are lost.
    """

    at: float
    version: PolicyVersion
    trained: tuple[str, ...] = ()
    filtered: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    staleness: tuple[int, ...] = ()
    """Staleness of each trained group, in optimizer steps."""
    rewards: tuple[float, ...] = ()
    """Mean score of each group: trained, then filtered ones."""
    resumed: bool = False
    rewound: bool = False
    moments: dict[str, int] = {}
    """With `trainer.rewards.normalize`: groups in the moments of each environment that normalized the scores."""
    consumer: str = ""
    """Consumer of the first rank; only in `settled.jsonl`."""


class DroppedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`dropped.jsonl`: one group that left the queue untrained."""

    at: float
    group_id: str
    state: str
    """`expired`, `dead` or `discarded`."""
    reason: str


class NotedClock(msgspec.Struct, frozen=True, kw_only=True):
    """`clocks.jsonl`: the clock of a producer on another host from this time on."""

    at: float
    producer: str
    offset_s: float
    """Seconds that the broker's clock is ahead of the producer's."""
    error_s: float
    """Bound of the error of the offset."""


class NameOwner(msgspec.Struct, frozen=True, kw_only=True):
    """`owners.jsonl`: a name that belongs to a key from this line on."""

    name: str
    """`producer:NAME` or `consumer:NAME`."""
    key: str
    """Name of the key; empty for none."""


class RunHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a lock file: its holder, for the error of a refused process."""

    name: str
    pid: int
    since: float
    """Start of the holder, wall-clock seconds."""


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """`hangs/WORKER.json`: code of an environment that holds the event loop of its worker now."""

    pid: int
    """Process of the worker."""
    where: str
    """File and line of the user's code, `sums.py:14`; empty if none of it runs."""
    task: str = ""
    """The task it works on, as text; empty if it is not known."""

    @property
    def text(self) -> str:
        """The place and the task, in one line."""
        task = f", with task {self.task}" if self.task else ""
        return f"its code is at {self.where}{task}" if self.where else "none of the environment's code runs"


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator's state of one worker, or of one engine beyond the first, whose `env` is `inference`.

    Times are of CLOCK_MONOTONIC, which all processes of a boot share.
    """

    worker: str
    env: str
    phase: str
    """`waiting` for a restart, `running`, `stopping`, or `fatal`: it is not restarted."""
    since: float
    """Start of the phase."""
    pid: int = 0
    """0 if it has no live process."""
    started: float | None = None
    """Start of the process."""
    start_ticks: int = 0
    """Start ticks of the process, which tell it from a later one of its pid; 0 if unknown."""
    due: float | None = None
    """Time of the restart it waits for, or of its replacement if it was given up."""
    crashes: int = 0
    """Crashes in a row."""
    restarts: int = 0
    reason: str = ""
    """Reason of the phase, and the end of its last process until it is stable again."""
    last_lines: tuple[str, ...] = ()
    """End of its log at the last crash."""
    ready: bool = False
    """Its process was ready."""
    was_ready: bool = False
    """Its process or an earlier one of its name was ready."""
    born: float | None = None
    """Time since which it is supervised, also by earlier orchestrators."""
    ends: float | None = None
    """While it is being ended, the time of SIGTERM: rollouts unfinished by then are abandoned."""
    rungs: tuple[tuple[float, Step], ...] = ()
    """While it is being ended, the remaining steps with their times, soonest first."""
    failing: bool = False
    """It is given up, or will be once it has ended."""
    returns: bool = False
    """It is being ended for a failure, and starts again."""
    host: str = ""
    """Host of its process, if a cluster has found one."""
    node: str = ""
    """Id of its node on the cluster; empty for a process of the run's own host, and while none is found."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster on which processes of the run may be.

    Attributes:
        node: Its id on the cluster.
        host: Its host.
        total, free: CPUs and GPUs, and what nobody uses of them.
        workers: Workers of this run on it.
        engines: Inference servers of this run on it.
        cordoned: Why it gets no new processes and loses those that it has; empty if it is in use.
        order: Number of the operators' last order for it, which was carried out.
    """

    node: str
    host: str = ""
    total: dict[str, float] = {}
    free: dict[str, float] = {}
    workers: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    cordoned: str = ""
    order: int = 0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Target number of workers of an environment, or of engines, with the reason."""

    env: str
    target: int
    current: int
    reason: str
    wanted: int | None = None
    """Number that an operator pinned, as the decision took it."""
    joined: int = 0
    """Those of `current` that joined by themselves, most from other hosts."""


class RestartOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an order to restart a worker."""

    done: bool
    text: str


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the orchestrator learned about the workers of an environment, for the next one."""

    env: str
    proven: bool = False
    """One of its workers has done work."""
    starts: tuple[float, ...] = ()
    """Recent times from the start of a process until it was ready, in seconds, the last one last."""
    failed_at: float | None = None
    """Time at which a worker was given up last, on CLOCK_MONOTONIC."""
    pause_s: float = 0.0
    """Pause after that before given-up workers are replaced."""


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """`supervision.json`: the workers of a run, except those that ended in order."""

    orchestrator: ProcessIdentity
    at: float | None = None
    """Heartbeat of the orchestrator: the time of writing, on CLOCK_MONOTONIC. At least one a second."""
    over: bool = False
    """The orchestrator ended in order."""
    targets: tuple[Target, ...] = ()
    engines: Target | None = None
    """Target number of inference servers, if it may change."""
    engine_lives: tuple[WorkerRecord, ...] = ()
    """The inference servers beyond the first, except those that ended in order."""
    workers: tuple[WorkerRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    """The nodes of the cluster."""
    limits: dict[str, str] = {}
    """Why an environment has fewer workers than it wants, or the run fewer engines (`inference`), where the cluster has
    no room."""
    environments: tuple[EnvironmentRecord, ...] = ()
    """What is known of the workers of each environment."""
    settings: dict[str, bool | int | float | str] = {}
    """Live settings in force, by dotted key."""
    restarts: dict[str, RestartOutcome] = {}
    """Outcome of each recent order to restart a worker or an engine, by its id."""


class Dismissed(msgspec.Struct, frozen=True):
    """A GPU event that an operator dismissed by uncordoning the GPU."""

    cause: Cause
    mark: str


class GpuRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU in `gpus.json`.

    Attributes:
        standing: Last published standing.
        automatic: Marks and reasons of its automatic cordons, by cause.
        manual: Reason of the operator's cordon, or None.
        dismissed: Events that do not cordon it again.
        level: Number of doublings of its clean time.
        relapsing: It was cordoned before, so the next cordon is a relapse.
        errors_before: Uncorrected memory errors of the driver's count that are older than this run; None if unknown.
        errors_last: The driver's count in the last sample.
        sample: Last sample.
    """

    standing: GpuStanding
    automatic: dict[Cause, tuple[str, str]] = {}
    manual: str | None = None
    dismissed: tuple[Dismissed, ...] = ()
    level: Count = 0
    relapsing: bool = False
    errors_before: Count | None = None
    errors_last: Count = 0
    sample: GpuSample | None = None


class GpuBook(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus.json`: state of the GPUs, for a restarted orchestrator and for `rolloutmq gpus`.

    Attributes:
        gpus: State of each GPU.
        limits: Reason for missing workers, by environment; empty if all workers fit.
    """

    gpus: tuple[GpuRecord, ...] = ()
    limits: dict[str, str] = {}
