"""The whole configuration of a run: `[run]`, `[model]`, `[telemetry]`, and the rules between sections."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolloutmq.schemas.config.base import MIB, NameText, Section
from rolloutmq.schemas.config.broker import SEQUENCE_BYTES, TOKEN_BYTES, BrokerConfig
from rolloutmq.schemas.config.distillation import TeacherConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.orchestrator import HardwareConfig, OrchestratorConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.config.weights import WeightsConfig
from rolloutmq.schemas.wire.distillation import TeacherLogprobs


class RunSection(Section):
    """`[run]`: the name, directory and logs of the run."""

    name: NameText = "run"
    """Name of the run. The broker refuses producers and consumers of another run."""
    dir: Path = Path("runs/run")
    """Directory for logs, metrics, checkpoints and sockets, relative to the working directory."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the tasks and the sampling."""
    tracking_project: str = ""
    """Project name for an experiment tracker such as Weights & Biases. RolloutMQ only forwards it."""
    tracking_group: str = ""
    """Group name for an experiment tracker. RolloutMQ only forwards it."""
    log_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 16 * MIB
    """Size at which a process log is rotated to `NAME.log.1`. An ordinary worker takes hours to fill it."""
    log_files: Annotated[int, Field(ge=1, le=1000)] = 3
    """Rotated logs kept for each process: with 16 MiB each, at most 64 MiB with the current one."""
    log_workers: PositiveInt = 200
    """Logs kept of ended workers, for each environment. The oldest are deleted first."""


class ModelConfig(Section):
    """`[model]`: the policy, loaded from `path` or built from these numbers with random weights."""

    path: str = ""
    """Local directory of a transformers model and its tokenizer. Empty: build a small Llama."""
    tokenizer: str = ""
    """Directory of the tokenizer, if it is not in `path`."""
    name: NameText = "policy"
    """Model name at the inference server."""
    alphabet: str = "0123456789= "
    """Characters of the tokenizer of a built model, one token each. Padding, begin and end are added."""
    hidden_size: PositiveInt = 64
    """Width of a built model."""
    layers: PositiveInt = 2
    """Layers of a built model."""
    heads: PositiveInt = 2
    """Attention heads of a built model."""
    mlp_size: PositiveInt = 128
    """Width of the MLP of a built model."""
    max_positions: PositiveInt = 128
    """Longest sequence of a built model, in tokens."""
    vocab_size: PositiveInt = 32
    """Rows of the embedding of a built model: at least the alphabet and three special tokens."""
    initializer_range: PositiveFloat = 0.05
    """Standard deviation of the initial weights of a built model."""
    tie_embeddings: bool = False
    """Share the embedding with the head of a built model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the shared weights. The optimizer always works in float32."""

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.tokenizer and not self.path:
            raise ValueError("tokenizer is only allowed with model.path; a built model uses its own alphabet")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size must be a multiple of heads {self.heads} (got {self.hidden_size})")
        if (least := len(set(self.alphabet)) + 3) > self.vocab_size:
            raise ValueError(
                f"vocab_size must be at least {least}, the alphabet and 3 special tokens (got {self.vocab_size})"
            )
        return self


class TelemetryConfig(Section):
    """`[telemetry]`: samples of host, GPUs and processes."""

    interval_s: PositiveFloat = 1.0
    """Time between two samples."""


class RunConfig(Section):
    """The whole configuration of a run."""

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
    """Directory of the configuration file; `file.py:Class` entries are relative to it. Set by the loader."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        shares = sum(env.min_share for env in self.environment.values())
        if shares > 1.0:
            raise ValueError(f"environment.*.min_share: must add up to at most 1 (got {shares:g})")
        if "inference" in self.environment:
            raise ValueError(
                "environment.inference: reserved name, it means the engines in `rolloutmq scale inference N`; "
                "rename the environment"
            )
        if self.inference.max_engines > 1 and not self.orchestrator.enabled:
            raise ValueError(
                f"inference.max_engines: must be 1 without the orchestrator (got {self.inference.max_engines}); "
                "set orchestrator.enabled = true"
            )
        if any(env.gpus for env in self.environment.values()):
            least_s = 2 * self.telemetry.interval_s
            if self.hardware.stale_s < least_s:
                raise ValueError(
                    f"hardware.stale_s: must be at least two telemetry.interval_s, {least_s:g} s "
                    f"(got {self.hardware.stale_s:g})"
                )
        return self

    @model_validator(mode="after")
    def _reach_who_samples(self) -> Self:
        backend, kind = self.weights.backend, self.inference.kind
        if backend == "vllm_http" and kind != "vllm":
            raise ValueError(
                f"weights.backend: `vllm_http` works only with vLLM (inference.kind is `{kind}`); "
                "use `posix_shm` or `disk`"
            )
        if backend == "disk" and kind == "vllm":
            raise ValueError("weights.backend: vLLM cannot read `disk`; use `posix_shm` or `vllm_http`")
        if backend == "disk" and kind != "tiny" and not self.trainer.enabled:
            raise ValueError(
                "weights.backend: no process of this run writes or reads weights on `disk`; use `posix_shm`"
            )
        device = self.trainer.device
        if backend == "posix_shm" and device != "cpu" and self.trainer.enabled:
            other = {"tiny": "disk", "vllm": "vllm_http"}.get(kind, "cuda_ipc")
            raise ValueError(
                f"weights.backend: `posix_shm` needs a trainer on the CPU (trainer.device is `{device}`); use `{other}`"
            )
        if backend == "cuda_ipc" and (
            device == "cpu" or kind in {"tiny", "vllm"} or not self.trainer.enabled
        ):
            raise ValueError(
                "weights.backend: `cuda_ipc` needs a trainer with device `cuda` and your own inference server "
                f"(trainer.device is `{device}`, inference.kind is `{kind}`)"
            )
        return self

    @model_validator(mode="after")
    def _learn_from_a_teacher(self) -> Self:
        if self.teacher.enabled and self.trainer.distillation.teacher_logprobs is TeacherLogprobs.NONE:
            raise ValueError(
                "trainer.distillation.kind: must not be `none` with a teacher; set `top_k`, `full` or `sampled`"
            )
        if self.teacher.enabled and not (self.trainer.enabled or self.model.path):
            raise ValueError(
                "model.path: required for a teacher with your own trainer; "
                "name the directory of the model that you train, for its tokenizer"
            )
        return self

    @model_validator(mode="after")
    def _keep_workers(self) -> Self:
        least = sum(env.min_workers for env in self.environment.values())
        if 0 < self.orchestrator.max_processes < least:
            raise ValueError(
                f"orchestrator.max_processes: must be at least {least}, the sum of environment.*.min_workers "
                f"(got {self.orchestrator.max_processes})"
            )
        return self

    @model_validator(mode="after")
    def _hold_batches(self) -> Self:
        batch, tokens = self.batch_sequences, self.trainer.batch_tokens
        if self.broker.high_bytes < max(batch * SEQUENCE_BYTES, tokens * TOKEN_BYTES):
            what = f"{tokens} tokens" if tokens else f"{batch} sequences"
            raise ValueError(
                f"broker.high_bytes: too small for a batch of {what} (got {self.broker.high_bytes}); raise it"
            )
        for name, env in self.environment.items():
            if env.group_size > batch and not tokens:
                raise ValueError(
                    f"environment.{name}.group_size: must not exceed trainer.batch_sequences {batch} "
                    f"(got {env.group_size})"
                )
            if self.broker.high_groups * env.group_size < batch:
                raise ValueError(
                    f"broker.high_groups: too small for a batch of {batch} sequences in groups of "
                    f"environment.{name}.group_size {env.group_size} (got {self.broker.high_groups}); raise it"
                )
            part = max(self.part(name), env.group_size)
            if 0 < env.high_bytes < part * SEQUENCE_BYTES:
                raise ValueError(
                    f"environment.{name}.high_bytes: too small for its {part} sequences of a batch "
                    f"(got {env.high_bytes}); raise it"
                )
        return self

    @property
    def unconfigured(self) -> EnvironmentConfig:
        """Configuration of an environment that has no section of its own but a producer.

        Environments of the gateway pace themselves and know no policy versions, so nothing is dropped as stale there.
        """
        if self.gateway.enabled:
            return EnvironmentConfig(entry="gateway:Gateway", group_size=1, pacing=False, stale="pass")
        return EnvironmentConfig(entry="unknown:Unknown", group_size=1)

    @property
    def batch_sequences(self) -> int:
        """Sequences of one step; with a token budget, the fewest that fill the budget."""
        longest = self.trainer.batch_tokens if self.model.path else self.model.max_positions
        return self.trainer.batch_sequences or max(1, self.trainer.batch_tokens // longest)

    def part(self, name: str) -> int:
        """Return the expected number of sequences of an environment in each batch, by weight or minimum share."""
        env = self.environment[name]
        peers = [peer.weight for peer in self.environment.values() if peer.split == env.split]
        share = env.weight / sum(peers) if any(peers) else 1.0 / len(peers)
        return int(self.batch_sequences * max(share, env.min_share))
