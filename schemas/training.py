"""What is learned from a batch, and how it reaches who samples: the `[trainer]` and the `[weights]` of a run."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rolloutmq.schemas.losses import DapoConfig, LossConfig
from rolloutmq.schemas.orchestration import MIB
from rolloutmq.schemas.section import Fraction, Section
from rolloutmq.schemas.teaching import DistillationConfig


class LoraConfig(Section):
    """`[trainer.lora]`: learn in small matrices beside frozen weights. The section alone turns it on."""

    rank: PositiveInt = 16
    """Of the two matrices of a layer."""
    alpha: PositiveFloat = 32.0
    """Their product counts `alpha / rank` times."""
    targets: tuple[str, ...] = ()
    """Linear layers that are adapted, such as `q_proj`; none named: all but the head."""


class TrainerConfig(Section):
    """`[trainer]`: what is learned from a batch and how."""

    enabled: bool = True
    """Start the trainer with the run; off for a trainer of your own. The inference server then waits for the weights
    that it publishes (`rolloutmq.trainer.weights`), in the way of `weights.backend`; an external one has its own."""
    steps: PositiveInt = 400
    """Optimizer steps of the run."""
    batch_sequences: NonNegativeInt = 256
    """Sequences of one step; 0 if `batch_tokens` says how much it holds."""
    batch_tokens: NonNegativeInt = 0
    """Most tokens of one step, instead of a number of sequences; 0 if `batch_sequences` says how many."""
    learning_rate: NonNegativeFloat = 1e-3
    warmup_steps: NonNegativeInt = 10
    """Steps of linear warm-up."""
    final_lr_fraction: Fraction = 0.05
    """The learning rate falls linearly to this part of itself at the last step."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    loss: LossConfig = DapoConfig()
    """What a step makes smaller, and how it weighs what it was given; `name` tells which."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens of one forward pass, padding included; the result does not depend on it. A sequence that is longer
    has a pass of its own."""
    pack: bool = True
    """Let short sequences share a row beside a long one, where that saves padding. None sees another."""
    logits_bytes: PositiveInt = 64 * MIB
    """Most memory of logits at once. A batch of 4,096 tokens and 32,000 words takes 500 MiB whole, several times over;
    in parts it is as fast."""
    recompute_blocks: bool = False
    """Compute the activations of each block again for its gradient, instead of keeping them: less memory, a third more
    time."""
    lora: LoraConfig | None = None
    checkpoint_interval: PositiveInt = 50
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Where the policy learns: `cpu`, or `cuda` or `cuda:1`, a GPU of this host as the trainer counts them. From there
    weights reach who samples by another `weights.backend` than the usual."""
    ranks: PositiveInt = 1
    """Processes of the trainer on this host, which share each step and hold the policy and its optimizer in parts."""
    rank_patience_s: PositiveFloat = 600.0
    """Longest that one rank waits for another: for a pass, a checkpoint, a model that is loaded. Who takes longer
    hangs: all ranks begin again from the checkpoint."""
    threads: PositiveInt = 1
    """Threads of one tensor operation. More than one helps only on cores that nobody else wants."""
    pull_wait_s: PositiveFloat = 10.0
    """How long one pull waits at the broker before it is repeated."""
    shuffle_rewards: bool = False
    """A control: rewards are shuffled within each group, so that nothing can be learned."""
    distillation: DistillationConfig = DistillationConfig()
    """What is learned from a teacher, beside or instead of the rewards."""

    @field_validator("loss", mode="before")
    @classmethod
    def _usual_loss(cls, given: Any) -> Any:
        """Let keys without a name be those of the usual loss."""
        return {"name": "dapo", **given} if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def _sized_by_tokens(cls, given: Any) -> Any:
        """Let a budget of tokens take the place of the usual number of sequences."""
        if isinstance(given, dict) and given.get("batch_tokens"):
            return {"batch_sequences": 0, **given}
        return given

    @model_validator(mode="after")
    def _adapters_of_one_rank(self) -> Self:
        if self.lora is not None and self.ranks > 1:
            raise ValueError("ranks must be 1 with lora: adapters are not sharded")
        return self

    @model_validator(mode="after")
    def _ranks_on_the_cpu(self) -> Self:
        if self.device != "cpu" and self.ranks > 1:
            raise ValueError(
                f"ranks must be 1 with device = {self.device!r}: several share a step on the CPU only"
            )
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if bool(self.batch_sequences) == bool(self.batch_tokens):
            raise ValueError("batch_tokens and batch_sequences: name one of them, the other is 0 or left out")
        return self


class WeightsConfig(Section):
    """`[weights]`: how what the trainer has learned reaches the server that samples."""

    backend: Literal["posix_shm", "disk", "vllm_http", "cuda_ipc"] = "posix_shm"
    """`posix_shm`: trainer and server map the same memory, without a copy. `disk`: each step leaves a version below
    `weights/` of the run directory, which a `tiny` server, or one of your own, reads. `vllm_http`: each step is sent to
    the run's vLLM, by the interface that vLLM has for that. `cuda_ipc`: a server of your own maps the weights of a
    trainer on the same GPU."""
