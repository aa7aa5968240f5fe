"""`[trainer]`: the optimizer steps of a run, and `[weights]`: the way of their weights to the inference server."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rolloutmq.schemas.config.base import MIB, Fraction, Section
from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.schemas.config.losses import DapoConfig, LossConfig
from rolloutmq.schemas.wire.requests import RANKS_LIMIT


class LoraConfig(Section):
    """`[trainer.lora]`: train low-rank adapters beside frozen weights. The section itself turns it on."""

    rank: PositiveInt = 16
    """Rank of the two matrices of an adapter."""
    alpha: PositiveFloat = 32.0
    """Scale of an adapter: its product is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Linear layers with an adapter, such as `q_proj`. Empty: all linear layers except the head."""


class NormalizationConfig(Section):
    """`[trainer.rewards]`: normalization of the scores by the moments of their environment.

    The broker keeps the moments of all accepted groups, and a batch brings them. Normalization is an affine map of the
    scores before they become advantages; every reported reward stays raw.
    """

    normalize: Literal["none", "zscore", "minmax"] = "none"
    """`zscore`: the deviation of the environment becomes 1; `minmax`: the range of its scores becomes 1. It makes the
    environments of a mixture comparable under `dr_grpo` and `rloo`. `grpo` divides by the deviation of each group
    anyway: there it changes nothing, unless `clip` cuts."""
    clip: PositiveFloat | None = None
    """Largest distance of a normalized score from the mean of its environment; a larger one is cut. None: no limit. One
    success in a thousand is 32 deviations from the mean."""
    warmup_groups: NonNegativeInt = 32
    """Groups that an environment needs before its moments count. Until then each of its groups is normalized by its own
    moments."""
    half_life_groups: PositiveInt | None = None
    """Groups of an environment after which an earlier group weighs half as much in its moments, for drifting rewards.
    None: all weigh the same. The broker applies it, also to moments for a trainer of your own; after a restart with
    another value it holds for later groups."""

    @model_validator(mode="after")
    def _clip_has_an_effect(self) -> Self:
        if self.clip is not None and self.normalize == "none":
            raise ValueError(
                f'clip has no effect with normalize = "none" (got {self.clip:g}); set normalize, or leave clip out'
            )
        return self


OFF: Final = frozenset({"false", "off", "no", "n", "f", "0"})
"""Values of a key that are false, as pydantic reads them."""


class TrainerConfig(Section):
    """`[trainer]`: the optimizer steps of a run."""

    enabled: bool = True
    """Start the trainer with the run. Off: you run your own trainer, and the inference server waits for the weights
    that it shares with `rolloutmq.share_weights`. An external server has its own weights."""
    steps: NonNegativeInt = 400
    """Optimizer steps of the run. With `enabled = false` there is no default: 0, or no value, is a run without an end.
    With a number the loop over a consumer ends after that step, and the run ends once your trainer has left."""
    batch_sequences: NonNegativeInt = 256
    """Sequences of one step. 0 with `batch_tokens`."""
    batch_tokens: NonNegativeInt = 0
    """Most tokens of one step, instead of a number of sequences. 0 with `batch_sequences`."""
    learning_rate: NonNegativeFloat = 1e-3
    """Learning rate after the warm-up. The default is for a small built model. A model from `model.path` has none:
    there the key is required. DeepSeekMath (arXiv:2402.03300, section 4.2) and DAPO (arXiv:2503.14476, section 4.1)
    have 1e-6."""
    warmup_steps: NonNegativeInt = 10
    """Steps of linear warm-up."""
    final_lr_fraction: Fraction = 0.05
    """The learning rate decays linearly to this fraction of itself at the last step."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Decay rates of the two moments of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    clip_norm: PositiveFloat = 1.0
    """Largest global norm of the gradient; a larger one is scaled down to it."""
    loss: LossConfig = DapoConfig.default()
    """The loss of a step; `name` selects it."""
    rewards: NormalizationConfig = NormalizationConfig.default()
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens of one forward pass, padding included. It does not change the result. A longer sequence has its own
    pass."""
    pack: bool = True
    """Pack short sequences into the row of a long one where this saves padding. No sequence attends to another."""
    logits_bytes: PositiveInt = 64 * MIB
    """Most memory for logits at once. With a vocabulary of 32,000 the logits of 4,096 tokens take 500 MiB, several
    times; computed in parts they are as fast."""
    fp32_head: bool = True
    """Compute the logits of a `bfloat16` policy in float32. In bfloat16 each is rounded to 8 bits, which moves
    log-probabilities by .02 on average and ratios as much. The engines of a run do the same."""
    recompute_blocks: bool = False
    """Gradient checkpointing: recompute the activations of each block for its gradient. It needs less memory and a
    third more time."""
    lora: LoraConfig | None = None
    checkpoint_interval: PositiveInt = 50
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept; the trainer deletes older ones."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Device of the policy: `cpu`, or a GPU of this host as torch numbers them, `cuda` or `cuda:1`. A GPU needs another
    `weights.backend` than the default."""
    ranks: Annotated[int, Field(gt=0, le=RANKS_LIMIT)] = 1
    """Processes of the trainer on this host. They divide each step and shard the policy and its optimizer."""
    rank_patience_s: PositiveFloat = 600.0
    """Longest wait of one rank for another, for example for a pass or a checkpoint. After it the other rank counts as
    hung, and all ranks restart from the checkpoint."""
    threads: PositiveInt = 1
    """Threads of one tensor operation. More help only on idle cores."""
    pull_wait_s: PositiveFloat = 10.0
    """Time that one pull waits at the broker before the trainer repeats it."""
    shuffle_rewards: bool = False
    """Control experiment: shuffle the rewards within each group, so there is nothing to learn."""
    distillation: DistillationConfig = DistillationConfig.default()
    """Loss from a teacher, beside or instead of the rewards."""

    @field_validator("loss", mode="before")
    @classmethod
    def _usual_loss(cls, given: Any) -> Any:
        """Apply keys without a `name` to the default loss."""
        return {"name": "dapo", **given} if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def _without_end(cls, given: Any) -> Any:
        """Leave the number of steps to a trainer of one's own, unless it is given."""
        if isinstance(given, dict) and str(given.get("enabled", True)).lower() in OFF:
            return {"steps": 0, **given}
        return given

    @model_validator(mode="after")
    def _some_steps(self) -> Self:
        if self.enabled and not self.steps:
            raise ValueError("steps must be at least 1 with trainer.enabled = true (got 0)")
        return self

    @model_validator(mode="before")
    @classmethod
    def _sized_by_tokens(cls, given: Any) -> Any:
        """Let a token budget replace the default number of sequences."""
        if isinstance(given, dict) and given.get("batch_tokens"):
            return {"batch_sequences": 0, **given}
        return given

    @model_validator(mode="after")
    def _adapters_of_one_rank(self) -> Self:
        if self.lora is not None and self.ranks > 1:
            raise ValueError(
                f"ranks must be 1 with trainer.lora (got {self.ranks}): adapters are not sharded"
            )
        return self

    @model_validator(mode="after")
    def _ranks_on_the_cpu(self) -> Self:
        if self.device != "cpu" and self.ranks > 1:
            raise ValueError(
                f"ranks must be 1 with device = {self.device!r} (got {self.ranks}): only CPU ranks share a step"
            )
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if bool(self.batch_sequences) == bool(self.batch_tokens):
            raise ValueError(
                f"batch_tokens must be 0 or batch_sequences must be 0, not both (got {self.batch_tokens} and "
                f"{self.batch_sequences}); set exactly one of them"
            )
        return self


class WeightsConfig(Section):
    """`[weights]`: the way of the weights from the trainer to the inference server."""

    backend: Literal["posix_shm", "disk", "vllm_http", "cuda_ipc", "stream"] = "posix_shm"
    """`posix_shm`: trainer and server map the same memory, without a copy. `disk`: each step writes a version below
    `weights/` in the run directory; a `tiny` server or your own reads it. `vllm_http`: the trainer sends each step to
    the run's vLLM through vLLM's weight-update interface; both may be on different devices. `cuda_ipc`: vLLM or your
    own server maps the weights of a trainer on the same GPU. `stream`: as `posix_shm`, and a relay serves
    the weights to the relays of other hosts, whose servers map them there. Neither `vllm_http` nor `cuda_ipc` has run
    on a GPU yet: they are tested on a CPU, `cuda_ipc` with a simulated GPU."""
    listen: str = "tcp://127.0.0.1:0"
    """Address of the relay with the backend `stream`, `tcp://HOST:PORT`; port 0 takes any. An address beyond this host
    needs `broker.keys`, and the weights are encrypted there. Relay and receivers then need the extra `cluster`."""
    insecure: bool = False
    """Do not encrypt the weights on an address beyond this host, and allow it without `broker.keys`. Tickets are still
    needed; without keys the broker gives one to everybody."""
