"""Distillation: `[teacher]` and `[trainer.distillation]`.

A teacher is another model with the same tokenizer. It returns log-probabilities for the positions of the trained
tokens; they are part of the group, in the columns `distill_token_ids` and `distill_logprobs`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rolloutmq.schemas.config.base import NameText, Section
from rolloutmq.schemas.wire.distillation import TeacherLogprobs


class DistillationConfig(Section):
    """`[trainer.distillation]`: the loss from a teacher's log-probabilities."""

    kind: Literal["none", "top_k", "full", "sampled"] = "none"
    """`top_k`: reverse KL divergence over the teacher's likeliest tokens plus one category for all others. `full`:
    reverse KL over the whole vocabulary, for small ones. `sampled`: a policy gradient whose advantage is the teacher's
    log-probability of the sampled token minus the student's. `none`: ignore the teacher's columns."""
    weight: NonNegativeFloat = 1.0
    """Weight of this loss. 0 is a control experiment: the teacher is queried and measured, but nothing is learned."""
    rl_weight: NonNegativeFloat = 1.0
    """Weight of the loss from rewards. 0: learn from the teacher alone. It applies unless `kind` is `none`."""
    top_k: PositiveInt = 16
    """Tokens returned by the teacher for each position with `top_k`. One more category holds the remaining
    probability, so a small number costs precision, not correctness."""
    shuffle_teacher: bool = False
    """Control experiment: move the teacher's log-probabilities to other positions of the same group."""

    @property
    def teacher_logprobs(self) -> TeacherLogprobs:
        """Tokens whose log-probabilities the teacher returns."""
        return TeacherLogprobs(self.kind)

    @property
    def teaches(self) -> bool:
        """Whether the trainer learns from a group whose scores are all equal."""
        return self.kind != "none" and self.weight > 0


class TeacherConfig(Section):
    """`[teacher]`: the model that the policy learns from. It is used if `path` or `url` is set."""

    path: str = ""
    """Model of transformers: a local directory, such as a checkpoint of another run, or the name of a model of a hub.
    This run serves it."""
    revision: str = ""
    """Branch, tag or commit of a model of a hub. Empty: its main branch. A resumed run keeps its commit."""
    tokenizer: str = ""
    """Directory of its tokenizer, if it is not in `path`."""
    name: NameText = "teacher"
    """Name of the model in answers and logs."""
    url: str = ""
    """Address of a teacher of another run, such as `http://10.0.0.7:41207`. Set it instead of `path`."""
    vllm_url: str = ""
    """Address of a vLLM with the model of `path`, such as `http://10.0.0.7:8000`. vLLM computes the
    log-probabilities; this run reads only `config.json` and the tokenizer of `path`."""
    host: str = "127.0.0.1"
    """Address to bind. Another one than loopback needs tokens, by `run.http_token_file` or `broker.keys`, or
    `insecure`."""
    insecure: bool = False
    """Allow a `host` within reach of other machines without a token: everybody who reaches the address queries the
    teacher."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to bind. 0 lets the system choose."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of its weights. It computes log-probabilities in float32 in either case."""
    max_batch: PositiveInt = 256
    """Most sequences of one batch."""
    pass_tokens: PositiveInt = 8192
    """Most tokens of one forward pass, padding included; a longer sequence has its own pass. With a vocabulary of
    32,000 the logits of 8,192 tokens take 1 GiB."""
    max_waiting: PositiveInt = 1024
    """Most waiting groups. Above it the teacher answers 503 and the worker retries."""
    threads: PositiveInt = 1
    """Threads of one tensor operation. More help only on idle cores."""
    retry_s: PositiveFloat = 1.0
    """Longest pause between attempts to reach a teacher that is away. It bounds the delay once the teacher is back."""
    attempts: PositiveInt = 8
    """Failures of the teacher on one group after which the worker abandons the group. A teacher that is away does not
    count as a failure."""

    @property
    def enabled(self) -> bool:
        """Whether the run has a teacher."""
        return bool(self.path or self.url)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.path and self.url:
            raise ValueError(
                f"url must be empty with teacher.path (got {self.url!r}); set url for a teacher of another run, "
                "or path to serve one here"
            )
        if self.revision and not self.path:
            raise ValueError("revision needs teacher.path: set it to the model of a hub")
        if self.vllm_url and not self.path:
            raise ValueError(
                "vllm_url needs teacher.path: set it to the directory of the model, for its tokenizer"
            )
        return self
