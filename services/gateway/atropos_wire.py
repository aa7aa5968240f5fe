"""Bodies of Atropos' HTTP interface, decoded and validated. Pure.

Names, types and nullable fields are those of its server (atroposlib 0.4.0). Everything it decodes decodes here, except
non-finite numbers: they would make the trainer's loss non-finite. Unknown fields are dropped, as there.
"""

import math
import re
from typing import Any, Final

import msgspec

from rolloutmq.schemas.errors import RolloutMQError

REQUIRED_OF_MESSAGE: Final = ("role", "content")


class RefusedBodyError(RolloutMQError):
    """Invalid body; `status` is the HTTP status, `place` the field.

    Attributes:
        kind: Keyword for programs.
    """

    def __init__(
        self, place: tuple[str | int, ...], reason: str, status: int = 422, kind: str = "value_error"
    ) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason
        self.status = status
        self.kind = kind


LARGEST: Final = 1 << 53
"""Larger numbers mean "no limit", such as the 1e30 of a tokenizer without one; other programs could not represent
them."""


def _bound(struct: msgspec.Struct) -> None:
    """Clamp the decoded integers to the range of the bus."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, int):
            msgspec.structs.force_setattr(struct, name, min(max(value, -LARGEST), LARGEST))
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is not finite")


class Registration(msgspec.Struct, frozen=True):
    """`POST /register`: settings of a trainer's run."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int

    def __post_init__(self) -> None:
        _bound(self)


class RegisterEnv(msgspec.Struct, frozen=True):
    """`POST /register-env`: settings of an environment."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None

    def __post_init__(self) -> None:
        _bound(self)


class EnvIdentifier(msgspec.Struct, frozen=True):
    """Identifies an environment by its number."""

    env_id: int


class ScoredData(msgspec.Struct, frozen=True):
    """`POST /scored_data`: one group, a list for each of its sequences.

    Attributes:
        masks: Labels: -100 for untrained tokens, else the token itself.
        advantages, ref_logprobs, inference_logprobs: One number for each token.
        distill_token_ids, distill_logprobs: `[sequence][position][k]`.
        env_id: None for an unregistered environment.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None


FIELDS: Final = ScoredData.__struct_fields__
"""All fields of a group, in the order of Atropos' replies."""

_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_DECODERS: Final[dict[Any, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind, strict=False)
    for kind in (Registration, RegisterEnv, EnvIdentifier, ScoredData, list[msgspec.Raw])
}


def decode(body: bytes, kind: Any) -> Any:
    """Return the body as one of the kinds above, or as a list of `ScoredData`.

    Raises:
        RefusedBodyError: Invalid JSON, or not of this kind.
    """
    try:
        if kind == list[ScoredData]:
            # Decode one by one: a decoder holds the interpreter.
            return [_DECODERS[ScoredData].decode(one) for one in _DECODERS[list[msgspec.Raw]].decode(body)]
        return _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `")
        if missing := _MISSING.fullmatch(reason):
            place = (*_place(where), missing[1])
            raise RefusedBodyError(place, "Field required", kind="missing") from None
        raise RefusedBodyError(_place(where), reason, kind="type_error") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if b"NaN" in body or b"Infinity" in body:
            raise RefusedBodyError(("body",), "a number is not finite", kind="finite_number") from None
        raise RefusedBodyError(("body",), str(error), kind="json_invalid") from None


def check_messages(data: ScoredData) -> None:
    """Raise RefusedBodyError for a message without a role or content; the environment owns everything else in it."""
    for row, conversation in enumerate(data.messages or ()):
        for number, message in enumerate(conversation):
            if not all(name in message for name in REQUIRED_OF_MESSAGE):
                place = ("body", "messages", row, number)
                raise RefusedBodyError(place, "Message must have 'role' and 'content' fields")


def _place(where: str) -> tuple[str | int, ...]:
    """Return the path in msgspec's notation, such as `$.tokens[...][...]`."""
    names = [part.partition("[")[0] for part in where.rstrip("`").lstrip("$").split(".")]
    return ("body", *(name for name in names if name))
