"""Bodies of Atropos' HTTP interface, decoded and validated. Pure.

Names, types and nullable fields are those of its server (atroposlib 0.4.0). Everything it decodes decodes here, except
non-finite numbers, which would make the trainer's loss non-finite, and values beyond the bounds of their fields. The
bus, the queue and the clients' files can hold everything within the bounds. Unknown fields are dropped, as there.

A large group is decoded field by field (`web.json_pieces`): its numbers become columns at once, and it is refused
if it has too many of other values.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rolloutmq.schemas.errors import InvalidGroupError, RolloutMQError
from rolloutmq.services.gateway.web.json_pieces import (
    CONTAINERS_LIMIT,
    PIECE_BYTES,
    Text,
    elements,
    fields,
    number_column,
    require_few_values,
    separators_of,
)

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


HOTTEST: Final = 1e6
"""Highest sampling temperature, above any in use: at it all tokens are equally likely."""


HEAVIEST: Final = 1e6
"""Largest weight of an environment: the others would get less than a sequence of any batch."""
NAME_LIMIT: Final = 512
"""Most characters of a name; W&B allows 128."""
PATH_LIMIT: Final = 4096
"""Most characters of a path, as on Linux."""
BATCH_LIMIT: Final = 1 << 24
"""Most sequences of a batch on the bus."""
UNKNOWN_COUNT: Final = -1
"""Value of a number that is unknown or unlimited."""

Title = Annotated[str, Meta(max_length=NAME_LIMIT)]
Steps = Annotated[int, Meta(ge=UNKNOWN_COUNT)]


def _bound(struct: msgspec.Struct) -> None:
    """Clamp the decoded integers to the range of the bus."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, int):
            msgspec.structs.force_setattr(struct, name, min(value, LARGEST))
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is not finite")


class Registration(msgspec.Struct, frozen=True):
    """`POST /register`: settings of a trainer's run."""

    wandb_group: Title
    wandb_project: Title
    batch_size: Annotated[int, Meta(ge=1, le=BATCH_LIMIT, description="Sequences of a batch.")]
    max_token_len: Annotated[Steps, Meta(description="Longest sequence in tokens; -1 is no limit.")]
    checkpoint_dir: Annotated[str, Meta(max_length=PATH_LIMIT)]
    save_checkpoint_interval: Annotated[Steps, Meta(description="Steps between checkpoints.")]
    starting_step: Annotated[int, Meta(ge=0, le=LARGEST, description="Step from which the trainer starts.")]
    num_steps: Annotated[Steps, Meta(description="Steps of the run.")]

    def __post_init__(self) -> None:
        _bound(self)


class RegisterEnv(msgspec.Struct, frozen=True):
    """`POST /register-env`: settings of an environment.

    Environments older than `group_size` send the first three; the size of a group is then that of the largest so far.
    """

    max_token_length: Annotated[Steps, Meta(description="Longest sequence in tokens.")]
    desired_name: Annotated[Title, Meta(description="Name in W&B and logs; need not be unique.")]
    weight: Annotated[
        float,
        Meta(
            ge=-HEAVIEST,
            le=HEAVIEST,
            description="Share of batches relative to other environments; below 0 counts as 0.",
        ),
    ]
    group_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Sequences of a group; groups of other sizes are accepted.",
        ),
    ] = 1
    min_batch_allocation: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(description="Part of each batch reserved for the environment, 0 to 1."),
    ] = None

    def __post_init__(self) -> None:
        _bound(self)


class EnvIdentifier(msgspec.Struct, frozen=True):
    """Identifies an environment by its number."""

    env_id: Annotated[int, Meta(description="Number from the reply to `/register-env`.")]


class ScoredData(msgspec.Struct, frozen=True):
    """`POST /scored_data`: one group, a list for each of its sequences."""

    tokens: list[list[int]]
    masks: Annotated[list[list[int]], Meta(description="Labels: -100 if untrained, else the token itself.")]
    scores: Annotated[list[float], Meta(description="One finite number for each sequence.")]
    advantages: Annotated[
        list[list[float]] | None, Meta(description="One for each token; used instead of those from scores.")
    ] = None
    ref_logprobs: Annotated[
        list[list[float]] | None, Meta(description="One for each token, of the reference policy.")
    ] = None
    messages: Annotated[
        list[list[dict[str, Any]]] | None, Meta(description="A conversation for each sequence; passed on.")
    ] = None
    generation_params: Annotated[
        dict[str, Any] | None,
        Meta(description="How the group was sampled. `temperature` counts in training."),
    ] = None
    inference_logprobs: Annotated[
        list[list[float]] | None,
        Meta(description="One for each token, of the policy that sampled it; 1.0 if untrained."),
    ] = None
    overrides: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="A map for each sequence, or none: `set_advantage_to_zero`, `temperature`, notes."),
    ] = None
    group_overrides: Annotated[
        dict[str, Any] | None, Meta(description="The same for the group: `temperature`, notes.")
    ] = None
    images: Annotated[Any, Meta(description="Passed on.")] = None
    env_id: Annotated[int | None, Meta(description="Null for an unregistered environment.")] = None
    distill_token_ids: Annotated[
        list[list[list[int]]] | None, Meta(description="Candidates of a teacher, `[sequence][position][k]`.")
    ] = None
    distill_logprobs: Annotated[
        list[list[list[float]]] | None, Meta(description="Their log-probabilities, of the same shape.")
    ] = None


FIELDS: Final = ScoredData.__struct_fields__
"""All fields of a group, in the order of Atropos' replies."""

NUMBERS: Final[Mapping[str, tuple[type, int]]] = {
    "tokens": (int, 1),
    "masks": (int, 1),
    "advantages": (float, 1),
    "ref_logprobs": (float, 1),
    "inference_logprobs": (float, 1),
    "distill_token_ids": (int, 2),
    "distill_logprobs": (float, 2),
}
"""Fields with numbers for each token: type and nesting."""
OPAQUE: Final = ("messages", "generation_params", "overrides", "group_overrides", "images")
"""Fields with values of any kind."""
LARGE_BYTES: Final = 1 << 20
"""Size from which a group is decoded field by field, also below it if it has many lists."""
GROUP_BYTES: Final = 64 << 20
"""Default of `broker.max_group_bytes`."""

_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_DECODERS: Final[dict[Any, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind, strict=False)
    for kind in (Registration, RegisterEnv, EnvIdentifier, ScoredData, list[msgspec.Raw])
}
_FIELDS: Final[Mapping[str, msgspec.json.Decoder[Any]]] = {
    one.name: msgspec.json.Decoder(one.type, strict=False) for one in msgspec.structs.fields(ScoredData)
}


def decode(body: bytes | bytearray, kind: Any, group_bytes: int = GROUP_BYTES) -> Any:
    """Return the body as one of the kinds above, or as a list of `ScoredData`.

    Args:
        body: JSON.
        kind: The struct.
        group_bytes: Limit of a group.

    Raises:
        RefusedBodyError: Invalid JSON, or not of this kind.
        GroupTooLargeError: The numbers of a group exceed the limit.
    """
    try:
        if kind == list[ScoredData]:
            # Decode one by one: a decoder holds the interpreter.
            is_large = len(body) >= LARGE_BYTES
            several = elements(body, "body") if is_large else _DECODERS[list[msgspec.Raw]].decode(body)
            return [_scored_data(memoryview(one), group_bytes) for one in several]
        if kind is ScoredData:
            return _scored_data(body, group_bytes)
        return _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _refused(error, ("body",)) from None
    except InvalidGroupError as error:
        place = () if error.column == "body" else (error.column,)
        raise RefusedBodyError(("body", *place), f"{error.column} {error.problem}") from None
    except RecursionError:
        raise RefusedBodyError(("body",), "is nested too deeply", kind="json_invalid") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if b"NaN" in body or b"Infinity" in body:
            raise RefusedBodyError(("body",), "a number is not finite", kind="finite_number") from None
        raise RefusedBodyError(("body",), str(error), kind="json_invalid") from None


def _scored_data(body: Text, group_bytes: int) -> ScoredData:
    if len(body) < LARGE_BYTES and separators_of(body, exact=False).containers <= CONTAINERS_LIMIT:
        group: ScoredData = _DECODERS[ScoredData].decode(body)
        return group
    texts = {name: text for name, text in fields(body).items() if name in FIELDS}
    for one in msgspec.structs.fields(ScoredData):
        if one.required and one.name not in texts:
            raise RefusedBodyError(("body", one.name), "Field required", kind="missing")
    require_few_values({name: texts[name] for name in OPAQUE if name in texts}, group_bytes)
    return ScoredData(**{name: _field(name, text, group_bytes) for name, text in texts.items()})


def _field(name: str, text: Text, group_bytes: int) -> Any:
    """Decode a field; large lists of numbers become columns."""
    try:
        if name in NUMBERS and len(text) > PIECE_BYTES:
            return number_column(name, text, *NUMBERS[name], group_bytes)
        return _FIELDS[name].decode(text)
    except msgspec.ValidationError as error:
        raise _refused(error, ("body", name)) from None


def _refused(error: msgspec.ValidationError, below: tuple[str, ...]) -> RefusedBodyError:
    reason, _, where = str(error).partition(" - at `")
    place = (*below, *_place(where))
    if missing := _MISSING.fullmatch(reason):
        return RefusedBodyError((*place, missing[1]), "Field required", kind="missing")
    return RefusedBodyError(place, reason, kind="type_error")


def check_messages(data: ScoredData) -> None:
    """Raise RefusedBodyError for a message without a role or content; the environment owns everything else in it."""
    for row, conversation in enumerate(data.messages or ()):
        for number, message in enumerate(conversation):
            if not all(name in message for name in REQUIRED_OF_MESSAGE):
                place = ("body", "messages", row, number)
                raise RefusedBodyError(place, "Message must have 'role' and 'content' fields")


def check_overrides(data: ScoredData) -> None:
    """Raise RefusedBodyError unless there is one map of overrides for each sequence, or none at all.

    The default `collect_trajectories` of Atropos leaves out sequences without overrides: nothing then says whose the
    others are.
    """
    rows, sequences = len(data.overrides or ()), len(data.scores)
    if rows not in {0, sequences}:
        reason = f"must have one map for each sequence, or none (got {rows} maps, {sequences} sequences)"
        raise RefusedBodyError(("body", "overrides"), reason)


def temperatures(data: ScoredData) -> list[float]:
    """Return the sampling temperature of each sequence, by the rules of Atropos' trainer.

    That of the sequence comes before that of `generation_params`, and this before that of the group; without one, and
    at 0 or below, where the likeliest token is taken, it is 1.

    Raises:
        RefusedBodyError: One of them is not a finite number.
    """
    shared = [
        _temperature(settings, ("body", name))
        for name in ("generation_params", "group_overrides")
        if (settings := getattr(data, name))
    ]
    common = next((one for one in shared if one is not None), 1.0)
    own = [
        _temperature(settings, ("body", "overrides", row))
        for row, settings in enumerate(data.overrides or ())
    ]
    return [common if one is None else one for one in own or [None] * len(data.scores)]


def _temperature(settings: dict[str, Any], place: tuple[str | int, ...]) -> float | None:
    value = settings.get("temperature")
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= HOTTEST:
        raise RefusedBodyError(
            (*place, "temperature"), f"must be a number up to {HOTTEST:g} (got {str(value)[:40]!r})"
        )
    return number if number > 0.0 else 1.0


def _place(where: str) -> tuple[str | int, ...]:
    """Return the path in msgspec's notation, such as `$.tokens[...][...]`."""
    names = [part.partition("[")[0] for part in where.rstrip("`").lstrip("$").split(".")]
    return tuple(name for name in names if name)
