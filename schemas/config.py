"""The configuration of a run: one frozen model for each process, and `RunConfig` that holds them.

A run is configured once, by a TOML file, environment variables and `--set key=value` (see `launch.settings`), and the
resolved result is written to `config.json` in the run directory, which every process of the run reads. The text under
a field is its documentation: units are in the name, the reason for a default is in the text.
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolloutmq.schemas.delivery import Durability
from rolloutmq.schemas.gateway import GatewayConfig
from rolloutmq.schemas.orchestration import MIB, HardwareConfig, OrchestratorConfig
from rolloutmq.schemas.section import Fraction, NameText, Section
from rolloutmq.schemas.serving import VllmConfig
from rolloutmq.schemas.teaching import Lore, TeacherConfig
from rolloutmq.schemas.training import TrainerConfig, WeightsConfig

SEQUENCE_BYTES: Final = 13
"""The shortest sequence there is: one token, its mask and its score. No batch is smaller than that."""
TOKEN_BYTES: Final = 5
"""One token of a longer one, and its mask."""


class RunSection(Section):
    """`[run]`: what the run is called and where it leaves its files."""

    name: NameText = "run"
    """Name of the run; part of every group's identity."""
    dir: Path = Path("runs/run")
    """Where logs, metrics, checkpoints and sockets go, relative to where the command was started."""
    seed: NonNegativeInt = 0
    """Seed of everything random: initial weights, tasks, sampling."""
    tracking_project: str = ""
    """Project name for a tracker such as Weights & Biases; only passed on."""
    tracking_group: str = ""
    """Group name for a tracker; only passed on."""
    log_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 16 * MIB
    """Size at which the log of a process is cut; what it held moves to `NAME.log.1`. Hours of an ordinary worker."""
    log_files: Annotated[int, Field(ge=1, le=1000)] = 3
    """Such parts that are kept of each process beside its log: with 16 MiB, 64 MiB of each at most."""
    log_workers: PositiveInt = 200
    """Logs that are kept of an environment's workers that are gone. Where many come and go, the oldest are removed."""


class BrokerConfig(Section):
    """`[broker]`: the queue and its limits."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """`ipc` for one machine, in a private directory; `tcp` binds `host` with ports of the system's choice."""
    host: str = "127.0.0.1"
    """Address to bind when the transport is tcp."""
    insecure: bool = False
    """Allow plain TCP on an address that other machines can reach. Without it that is refused."""
    durability: Durability = Durability.DISK
    """What an ack survives. `disk`: a power cut; `os`: the broker being killed; `memory`: neither."""
    commit_ms: NonNegativeFloat = 10.0
    """How long acks may be gathered for one write to disk. Batches and settlements never wait for it."""
    segment_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 256 * MIB
    """Size of one file of the journal. It is removed when nothing in it is needed any more."""
    shared_memory: bool = True
    """Groups of producers on this host lie in memory that broker and trainers read; otherwise they are sent. On ipc."""
    ram_bytes: PositiveInt = 256 * MIB
    """Groups beyond it are read back from the journal when a batch needs them. At `memory` it does not bind."""
    history_bytes: PositiveInt = 1024 * MIB
    """Logs of what became of each group, kept for `explain` and `ledger verify`; the oldest go above it."""
    dead_bytes: PositiveInt = 256 * MIB
    """Dead groups kept with their contents; above it only their records stay."""
    replay: bool = False
    """Keep every segment, also those whose groups are all committed."""
    high_bytes: PositiveInt = 256 * MIB
    """Global mark: queued, leased and granted bytes of all environments stay below it."""
    high_groups: PositiveInt = 100_000
    """The same in groups; above it the broker stops reading."""
    max_group_bytes: PositiveInt = 64 * MIB
    """Largest group that is accepted."""
    overhead_bytes: Annotated[int, Field(ge=64 * MIB)] = 512 * MIB
    """Memory of the broker beyond what its groups explain, counted above `high_bytes`. If there is more, peers fill it
    with messages that they do not finish: every connection is cut, and honest peers come back."""
    retain_bytes: PositiveInt = 256 * MIB
    """Trained groups kept for a trainer that may come back from a checkpoint; above it a checkpoint is asked for."""
    ack_interval_s: PositiveFloat = 0.25
    """How often an ack is repeated while anything is unacked or blocked: an event may be lost, state may not."""
    pressure_interval_s: PositiveFloat = 0.25
    """How often `pressure` is published."""
    lease_s: PositiveFloat = 120.0
    """A leased step is taken back when its trainer makes no progress for that long."""
    silence_s: PositiveFloat = 10.0
    """A trainer or worker that sent no heartbeat for that long is taken for dead."""
    max_deliveries: PositiveInt = 3
    """A group whose lease failed that often goes to the dead letters."""
    max_tasks: PositiveInt = 10_000
    """Most submitted tasks that are open at once; beyond it a submission is told when to come again."""
    task_bytes: PositiveInt = 64 * MIB
    """Most bytes of their payloads together."""
    remembered_tasks: PositiveInt = 10_000
    """Tasks that are over and still answered for; the one that ended first is forgotten for one more."""
    exact_wait_s: NonNegativeFloat = 5.0
    """How long a pull waits for an exact combination of whole groups before it takes the largest below."""
    silent_env_s: PositiveFloat = 30.0
    """An environment that delivered nothing for that long gives up its minimum share."""


class EnvironmentConfig(Section):
    """`[environment.NAME]`: one environment and its workers."""

    entry: str
    """Class of the environment: `package.module:Class`, or `file.py:Class` next to the configuration file."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    group_size: PositiveInt = 8
    """Sequences sampled for one task."""
    weight: NonNegativeFloat = 1.0
    """Share of the batches, relative to the other environments."""
    min_share: Fraction = 0.0
    """Part of every batch kept for this environment."""
    high_bytes: NonNegativeInt = 0
    """Mark of its own: its queued, leased and granted bytes stay below, and only its workers wait for that. 0: none."""
    split: Literal["train", "eval"] = "train"
    """Which stream its groups belong to."""
    min_workers: NonNegativeInt = 1
    """Fewest worker processes."""
    max_workers: PositiveInt = 4
    """Most worker processes."""
    gpus: NonNegativeInt = 0
    """GPUs of each worker process; it sees no others. 0: none are given, and none are hidden."""
    vram_bytes: NonNegativeInt = 0
    """Memory that one worker process takes on each of its GPUs; nobody is started where it is not free. 0: it shares
    its GPUs with no other worker."""
    concurrency: PositiveInt = 8
    """Rollouts that one worker has under way at once, credit permitting."""
    max_staleness: NonNegativeInt = 4
    """Most optimizer steps between the policy that sampled a group and the one that learns from it."""
    pacing: bool = True
    """Keep `max_staleness` by starting no rollout that would be too old when its turn comes."""
    stale: Literal["drop", "pass"] = "drop"
    """What happens to a group that is too old all the same: counted as expired, or trained on and counted."""
    rollout_timeout_s: PositiveFloat = 600.0
    """A rollout that takes longer is abandoned."""
    min_group_size: NonNegativeInt = 0
    """Fewest sequences of a group that is closed at `group_deadline_s`; 0 is all of them."""
    group_deadline_s: NonNegativeFloat = 0.0
    """A group that has `min_group_size` sequences by then goes without the others, which are counted as late members;
    0 waits for all. The environment must have a method `member`, as every `SingleTurn` has."""
    tasks: Literal["own", "submitted", "both"] = "own"
    """Whose tasks are rolled out: those the environment draws, those a trainer submits, or its own where none are
    submitted. Submitted ones need a method `rollout_task`, as every `SingleTurn` has."""
    failure_limit: PositiveInt = 20
    """Rollouts in a row that may raise before the worker gives up and the run fails."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError("min_workers must not exceed max_workers")
        if self.min_group_size > self.group_size:
            raise ValueError("min_group_size must not exceed group_size")
        if self.vram_bytes and not self.gpus:
            raise ValueError("vram_bytes is the memory of a GPU: say with gpus how many a worker gets")
        if self.entry.count(":") != 1:
            raise ValueError("entry must be `package.module:Class` or `file.py:Class`")
        return self


class InferenceConfig(Section):
    """`[inference]`: the server that samples from the policy."""

    kind: Literal["tiny", "vllm", "external", "none"] = "tiny"
    """`tiny` runs the policy of `[model]` in this run, `vllm` does so by a vLLM (`weights.backend` says how the weights
    get there); `external` is the server at `url`; `none`: nobody asks."""
    url: str = ""
    """Base address of an external OpenAI-compatible server, for example `http://127.0.0.1:8000/v1`."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to bind; 0 lets the system choose. That of the first engine: the others take any."""
    vllm: VllmConfig = VllmConfig()
    max_batch: PositiveInt = 512
    """Sequences generated together at most."""
    max_waiting: PositiveInt = 4096
    """Requests that may wait; beyond it the server answers 503."""
    min_engines: PositiveInt = 1
    """Fewest servers, all of one copy of the weights. The launcher keeps the first, the orchestrator the others."""
    max_engines: PositiveInt = 1
    """Most servers. Each takes a core, which only somebody who knows the machine can give: so no more by itself."""
    engine_confirm_s: PositiveFloat = 120.0
    """Another is started once more workers have brought no more for that long. The knee is judged 45 s after the last
    change, and once more as long after the way back to it: so what the last engine changed is seen by then."""
    engine_idle_s: PositiveFloat = 600.0
    """One ends when the others could have done its work for that long: to start it again costs less than a pause."""

    @model_validator(mode="after")
    def _external(self) -> Self:
        if (self.kind == "external") != bool(self.url):
            raise ValueError("url must be given if and only if kind is `external`")
        if self.min_engines > self.max_engines:
            raise ValueError("min_engines must not exceed max_engines")
        if self.kind != "tiny" and self.max_engines > 1:
            why = (
                "it is the one engine of its run"
                if self.kind == "vllm"
                else "nobody here can start such a server"
            )
            raise ValueError(f"max_engines must be 1 where kind is `{self.kind}`: {why}")
        return self


class ModelConfig(Section):
    """`[model]`: the policy, built from these numbers with random weights, or loaded from `path`."""

    path: str = ""
    """Local directory of a transformers model and its tokenizer; empty builds a small Llama."""
    tokenizer: str = ""
    """Directory of the tokenizer, if that is not in `path`."""
    name: NameText = "policy"
    """What it is called where it is served."""
    alphabet: str = "0123456789= "
    """Characters of the built tokenizer; padding, begin and end are added."""
    hidden_size: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 2
    mlp_size: PositiveInt = 128
    max_positions: PositiveInt = 128
    """Longest sequence in tokens."""
    vocab_size: PositiveInt = 32
    """Rows of the embedding; at least the alphabet and the special tokens."""
    initializer_range: PositiveFloat = 0.05
    """Standard deviation of the initial weights."""
    tie_embeddings: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the shared weights. The optimizer always works on float32."""

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.tokenizer and not self.path:
            raise ValueError("tokenizer is for a model from path; that which is built has its alphabet")
        if self.hidden_size % self.heads:
            raise ValueError("hidden_size must be a multiple of heads")
        if len(set(self.alphabet)) + 3 > self.vocab_size:
            raise ValueError("vocab_size must hold the alphabet and 3 special tokens")
        return self


class TelemetryConfig(Section):
    """`[telemetry]`: samples of the machine, and the record of what was published."""

    interval_s: PositiveFloat = 1.0
    """Time between two samples."""


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    broker: BrokerConfig = BrokerConfig()
    environment: dict[NameText, EnvironmentConfig] = {}
    """`[environment.NAME]` sections by name."""
    inference: InferenceConfig = InferenceConfig()
    model: ModelConfig = ModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    teacher: TeacherConfig = TeacherConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    hardware: HardwareConfig = HardwareConfig()
    gateway: GatewayConfig = GatewayConfig()
    base_dir: Path = Path()
    """Directory of the configuration file, to which `file.py:Class` entries are relative. Filled in by the loader."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        shares = sum(env.min_share for env in self.environment.values())
        if shares > 1.0:
            raise ValueError(f"environment.*.min_share: together {shares:g}, at most 1 allowed")
        if "inference" in self.environment:
            raise ValueError("environment.inference: means the engines in `rolloutmq scale inference N`")
        if self.inference.max_engines > 1 and not self.orchestrator.enabled:
            raise ValueError(
                "inference.max_engines: more than one needs the orchestrator, which keeps the others"
            )
        if any(env.gpus for env in self.environment.values()):
            least_s = 2 * self.telemetry.interval_s
            if self.hardware.stale_s < least_s:
                raise ValueError(f"hardware.stale_s: less than two telemetry.interval_s, {least_s:g} s")
        return self

    @model_validator(mode="after")
    def _reach_who_samples(self) -> Self:
        backend, kind = self.weights.backend, self.inference.kind
        if backend == "vllm_http" and kind != "vllm":
            raise ValueError(
                f"weights.backend: `vllm_http` is vLLM's own interface, and inference.kind is `{kind}`"
            )
        if backend == "disk" and kind == "vllm":
            raise ValueError(
                "weights.backend: vLLM reads no `disk`: it maps the weights (`posix_shm`) or is sent them (`vllm_http`)"
            )
        if backend == "disk" and kind != "tiny" and not self.trainer.enabled:
            raise ValueError("weights.backend: nobody in this run writes or reads weights on `disk`")
        device = self.trainer.device
        if backend == "posix_shm" and device != "cpu" and self.trainer.enabled:
            other = {"tiny": "disk", "vllm": "vllm_http"}.get(kind, "cuda_ipc")
            raise ValueError(f"weights.backend: `{device}` (trainer.device) has no {backend}: use `{other}`")
        if backend == "cuda_ipc" and (
            device == "cpu" or kind in {"tiny", "vllm"} or not self.trainer.enabled
        ):
            raise ValueError(
                "weights.backend: `cuda_ipc` is between a trainer with device = 'cuda' and a server of your own"
            )
        return self

    @model_validator(mode="after")
    def _learn_from_a_teacher(self) -> Self:
        if self.teacher.enabled and self.trainer.distillation.lore is Lore.NONE:
            raise ValueError("trainer.distillation.kind: there is a teacher, and nobody learns from it")
        if self.teacher.enabled and not (self.trainer.enabled or self.model.path):
            raise ValueError("model.path: a teacher must know the tokenizer of the model that you train")
        return self

    @model_validator(mode="after")
    def _keep_workers(self) -> Self:
        least = sum(env.min_workers for env in self.environment.values())
        if 0 < self.orchestrator.max_processes < least:
            most = f"orchestrator.max_processes: {self.orchestrator.max_processes}"
            raise ValueError(f"{most}, but environment.*.min_workers: together {least}")
        return self

    @model_validator(mode="after")
    def _hold_batches(self) -> Self:
        batch, tokens = self.batch_sequences, self.trainer.batch_tokens
        if self.broker.high_bytes < max(batch * SEQUENCE_BYTES, tokens * TOKEN_BYTES):
            what = f"{tokens} tokens" if tokens else f"{batch} sequences"
            raise ValueError(f"broker.high_bytes: {self.broker.high_bytes} never hold a batch of {what}")
        for name, env in self.environment.items():
            if env.group_size > batch and not tokens:
                raise ValueError(
                    f"environment.{name}.group_size: {env.group_size} exceeds trainer.batch_sequences {batch}"
                )
            if self.broker.high_groups * env.group_size < batch:
                raise ValueError(
                    f"broker.high_groups: {self.broker.high_groups} groups of environment.{name} never make a batch"
                )
            part = max(self.part(name), env.group_size)
            if 0 < env.high_bytes < part * SEQUENCE_BYTES:
                raise ValueError(
                    f"environment.{name}.high_bytes: {env.high_bytes} never hold its {part} sequences of a batch"
                )
        return self

    @property
    def unconfigured(self) -> EnvironmentConfig:
        """What holds for an environment that a producer brought along and that is not configured.

        Those that come through the gateway pace themselves, and know no policy versions: nothing is too old there.
        """
        if self.gateway.enabled:
            return EnvironmentConfig(entry="gateway:Gateway", group_size=1, pacing=False, stale="pass")
        return EnvironmentConfig(entry="unknown:Unknown", group_size=1)

    @property
    def batch_sequences(self) -> int:
        """Sequences of one step; where a budget of tokens bounds it, the fewest that are known to fill the budget."""
        longest = self.trainer.batch_tokens if self.model.path else self.model.max_positions
        return self.trainer.batch_sequences or max(1, self.trainer.batch_tokens // longest)

    def part(self, name: str) -> int:
        """Return how many sequences of each batch an environment is expected to give, by weight or minimum share."""
        env = self.environment[name]
        peers = [peer.weight for peer in self.environment.values() if peer.split == env.split]
        share = env.weight / sum(peers) if any(peers) else 1.0 / len(peers)
        return int(self.batch_sequences * max(share, env.min_share))
