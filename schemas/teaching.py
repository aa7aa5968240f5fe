"""What is learned from a teacher: `[teacher]`, `[trainer.distillation]`, and what a teacher is asked and answers.

A teacher is another model of the same tokenizer. It is asked how likely it finds what could stand in the place of each
trained token; what it says travels with the group, in the columns `distill_token_ids` and `distill_logprobs`.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal, Self

from msgspec import Meta
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rolloutmq.schemas.errors import ConfigError, RetryableError, UsageError
from rolloutmq.schemas.message import Message
from rolloutmq.schemas.section import NameText, Section

IDS_COLUMN: Final = "distill_token_ids"
LOGPROBS_COLUMN: Final = "distill_logprobs"
"""The columns of what a teacher said: `[sequence][position][k]`. A position that is not trained may have no entry."""
TOKENIZER_COLUMN: Final = "distill_tokenizer"
"""The fingerprint of its tokenizer, a text for each sequence: whose token ids those are."""

TEACH_PATH: Final = "/v1/token_logprobs"
"""Where a teacher is asked, by POST, in msgpack."""
HEALTH_PATH: Final = "/health"
"""Where it says, with status 200, that it is well."""
AWAY: Final = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses by which a teacher, or who stands before it, says that it takes no question now: they pass by themselves."""


class Lore(StrEnum):
    """Which tokens a teacher tells of, in the place of each trained one."""

    NONE = "none"
    TOP_K = "top_k"
    """Those that it finds the likeliest."""
    FULL = "full"
    """All of its vocabulary, in the order of their ids: for small ones."""
    SAMPLED = "sampled"
    """The one that the student sampled."""


class DistillationConfig(Section):
    """`[trainer.distillation]`: what is learned from what a teacher said of each trained token."""

    kind: Literal["none", "top_k", "full", "sampled"] = "none"
    """`top_k`: the reverse KL divergence over the teacher's likeliest tokens and one category for all others; `full`:
    over the whole vocabulary, for small ones; `sampled`: a policy gradient whose advantage is by how much the teacher
    finds the sampled token likelier than the student does. `none`: what a teacher said is left aside."""
    weight: NonNegativeFloat = 1.0
    """Weight of this loss. 0 is a control: everything is asked and measured, and nothing learned."""
    rl_weight: NonNegativeFloat = 1.0
    """Weight of the loss from rewards, beside it; 0 to learn from the teacher alone. It counts where `kind` is not
    `none`."""
    top_k: PositiveInt = 16
    """Tokens that the teacher tells of in each place, for `top_k`. The rest of its probability is one category more, so
    that few will do: what they leave out costs precision, not soundness."""
    shuffle_teacher: bool = False
    """A control: within a group, what the teacher said of one place stands in another's."""

    @property
    def lore(self) -> Lore:
        """Which tokens the teacher is to tell of."""
        return Lore(self.kind)

    @property
    def teaches(self) -> bool:
        """Whether a group without any spread of its rewards has something to learn from all the same."""
        return self.kind != "none" and self.weight > 0


class TeacherConfig(Section):
    """`[teacher]`: a model that the policy learns from; there is one where `path` or `url` is given."""

    path: str = ""
    """Local directory of a transformers model, such as a checkpoint of another run. It is served within this run."""
    tokenizer: str = ""
    """Directory of its tokenizer, if that is not in `path`."""
    name: NameText = "teacher"
    """What it is called in answers and logs."""
    url: str = ""
    """Address of a teacher that another run serves, for example `http://10.0.0.7:41207`, instead of `path`."""
    vllm_url: str = ""
    """Address of a vLLM that has the model of `path` loaded, for example `http://10.0.0.7:8000`: it is asked, and of
    `path` only `config.json` and the tokenizer are read here."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to bind; 0 lets the system choose."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of its weights. What it answers is computed in float32 either way."""
    max_batch: PositiveInt = 256
    """Sequences that are read together at most."""
    pass_tokens: PositiveInt = 8192
    """Most tokens of one forward pass, padding included, unless one sequence alone is longer: with a vocabulary of 32
    thousand the logits of so many take 1 GiB."""
    max_waiting: PositiveInt = 1024
    """Groups that may wait; beyond it they are told to come again."""
    threads: PositiveInt = 1
    """Threads of one tensor operation. More than one helps only on cores that nobody else wants."""
    retry_s: PositiveFloat = 1.0
    """Longest pause before a teacher that is away is asked again: what a group waits in vain once it is back."""
    attempts: PositiveInt = 8
    """How often a teacher that is there may fail on a group before the group is given up. While it is away nothing is
    counted."""

    @property
    def enabled(self) -> bool:
        """Whether there is one."""
        return bool(self.path or self.url)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.path and self.url:
            raise ValueError("url and path: a teacher is served by this run, or by another, not both")
        if self.vllm_url and not self.path:
            raise ValueError(
                "vllm_url: name the directory of its model in `path`; its tokenizer must be the student's"
            )
        return self


Bytes = Annotated[bytes, Meta(max_length=1 << 28)]
Lengths = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=1 << 16)]


class TeachRequest(Message, tag="teach", frozen=True, kw_only=True):
    """Ask what the teacher says of some tokens. Arrays are flat and little-endian.

    Attributes:
        tokenizer: Fingerprint of the student's tokenizer.
        vocabulary: Token ids that the student knows; 0 if nobody says.
        lore: Which tokens to tell of.
        top_k: How many, for `top_k`.
        tokens: i32, all sequences one after the other.
        lengths: Of the sequences.
        wanted: One byte a token, 1 where the teacher is to speak; never the first of a sequence.
    """

    tokenizer: str
    vocabulary: Annotated[int, Meta(ge=0)] = 0
    lore: Lore
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    tokens: Bytes
    lengths: Lengths
    wanted: Bytes


class TeachReply(Message, tag="taught", frozen=True, kw_only=True):
    """What it says: `k` entries for each token that was wanted, in their order.

    Attributes:
        model: The teacher's name.
        k: Entries of each token.
        token_ids: i32, `(wanted, k)`.
        logprobs: f32, the same; at temperature 1, of all the vocabulary: what is missing to 1 is the tail.
    """

    model: str
    k: int
    token_ids: bytes
    logprobs: bytes


class TokenizerMismatchError(ConfigError):
    """Teacher and student do not mean the same by the same token id; nothing can be learned from one another."""

    def __init__(self, problem: str) -> None:
        super().__init__("teacher", problem)

    @classmethod
    def of(cls, teacher: str, student: str) -> Self:
        """Make it of two fingerprints; an empty one is that of no tokenizer."""
        theirs, own = (told[:16] or "none" for told in (teacher, student))
        return cls(f"its tokenizer has the fingerprint {theirs}, the student's has {own}")


class VocabularyMismatchError(ConfigError):
    """Teacher and student know different numbers of token ids, and are to be compared over all of them."""

    CODE: ClassVar[str] = "vocabulary_mismatch"
    """What a refusal of a teacher is called that means this."""

    def __init__(self, problem: str) -> None:
        super().__init__("teacher", problem)

    @classmethod
    def of(cls, teacher: int, student: int) -> Self:
        """Make it of two sizes."""
        return cls(
            f'it knows {teacher} token ids, the student {student}: trainer.distillation.kind = "full" compares all '
            "of them; top_k and sampled need not"
        )

    @classmethod
    def check(cls, lore: Lore, teacher: int, student: int) -> None:
        """Raise it where the whole vocabularies are compared and both sizes are known (not 0) and differ."""
        if lore is Lore.FULL and teacher and student and teacher != student:
            raise cls.of(teacher, student)


class TeacherFailedError(RetryableError):
    """The teacher was there and failed on a group, as often as it is asked; what else it is asked may fare better."""

    def __init__(self, times: int, last: str) -> None:
        self.times = times
        self.last = last
        """What went wrong with the last attempt."""

    def __str__(self) -> str:
        return f"the teacher failed {self.times} times on a group, the last: {self.last}"


class TeacherRefusedError(UsageError):
    """The teacher does not accept what it is asked; asking again cannot help."""

    def __init__(self, status: int, why: str) -> None:
        self.status = status
        self.why = why

    def __str__(self) -> str:
        return f"the teacher refused, status {self.status}: {self.why}"
