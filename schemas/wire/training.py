"""Training as the bus tells it, whoever trains: settled batches, reported by the broker, and figures of a trainer."""

from typing import Annotated

from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count, Message, Name, Seconds
from rolloutmq.schemas.wire.health import LaneScores

FIGURES_LIMIT = 64
"""Most figures of one step."""
FigureName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_./-]{0,63}\Z")]


class BatchSettled(Message, tag="batch_settled", frozen=True, kw_only=True):
    """A training batch that every rank has settled; published on `telemetry.settled.RUN`.

    All figures come from the headers of its groups, so they do not depend on the trainer. Rejected groups count only in
    `rejected`.
    """

    run: Name
    incarnation: Count
    step: Count
    """Optimizer step of the policy after the batch."""
    at: Seconds
    stepped: bool
    """A group was trained on. Without one the batch was no step, and the policy stays."""
    reward: float
    """Mean score of all sequences, those of filtered groups included."""
    sequences: Count
    """Sequences that the trainer could use."""
    tokens: Count
    trained: Count
    """Groups that the step trained on."""
    filtered: Count
    """Groups without a learning signal."""
    rejected: Count
    """Groups that the trainer cannot use."""
    staleness_max: Count
    """Largest staleness of a trained group, from its oldest token to the policy that pulled it."""
    staleness_mean: float
    scores: tuple[LaneScores, ...] = ()
    """Scores of each environment. Lengths and scores of single sequences are not in the headers: `sxx`, `syy` and
    `sxy` are 0, and `at_low` and `at_high` are exact only where all scores of a group are at either end of its range,
    as with 0 and 1; else they count one sequence each."""


class StepFigures(Message, tag="step_figures", frozen=True, kw_only=True):
    """Figures that a trainer logged for a step; published on `telemetry.figures.RUN`."""

    run: Name
    incarnation: Count
    step: Count
    at: Seconds
    figures: Annotated[dict[FigureName, float], Meta(max_length=FIGURES_LIMIT)] = {}
    """Finite numbers by name."""
    not_finite: Annotated[tuple[FigureName, ...], Meta(max_length=FIGURES_LIMIT)] = ()
    """Names of figures that were infinite or not a number."""
