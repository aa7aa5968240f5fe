"""Gradient of a step, accumulated in the policy over its forward passes.

Each loss is divided by the size of the whole step, over all passes and ranks, so that the parts add up. Ranks run their
passes together, because sharded parameters are gathered together; a rank without passes left runs idle ones.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.trainer.losses.distillation import TeacherInputs, combined, distillation
from rolloutmq.trainer.losses.inputs import LossInputs, StepSize
from rolloutmq.trainer.losses.registry import REFERENCE, find_loss
from rolloutmq.trainer.policy.device import device_of
from rolloutmq.trainer.ranks import Ranks
from rolloutmq.trainer.step.collate import MicroBatch
from rolloutmq.trainer.step.logprobs import LogprobScorer
from rolloutmq.trainer.step.optimizer import entropy_weight
from rolloutmq.trainer.step.report import Metrics, total_of
from rolloutmq.trainer.step.teacher_columns import apart, taught


def leave_gradient(
    passes: Sequence[MicroBatch],
    step: int,
    config: TrainerConfig,
    scorer: LogprobScorer,
    ranks: Ranks,
    after_each: Callable[[], None],
) -> dict[str, float]:
    """Accumulate the gradient of a step in the policy; return the metrics of the loss.

    Args:
        passes: Forward passes of this rank; may be empty.
        step: The step, counted from 1.
        config: Loss and distillation.
        scorer: Computes log-probabilities.
        ranks: Ranks of the step.
        after_each: Called after each backward pass, idle ones too, to show progress.
    """
    loss, teacher = find_loss(config.loss), config.distillation
    settings = config.loss.model_copy(update={"entropy": entropy_weight(config, step)})
    tokens = sum(p.rows.numel() for p in passes)
    judged = sum(int(p.judged.sum()) for p in passes)
    tokens, judged, sequences = ranks.sums(tokens, judged, sum(p.judged_sequences for p in passes))
    # Tokens with teacher entries only do not count in the RL loss.
    size = StepSize(max(1, judged), max(1, sequences))
    longest = ranks.most(len(passes))
    totals: dict[str, Tensor] = {}
    device = device_of(scorer.policy)
    for one in (plain.on(device) for plain in passes):
        entries = taught(one, teacher)
        also = entries.asked if entries else None
        scores, entropy = scorer(
            one.tokens, one.rows, one.positions, one.position_ids, also, one.temperatures
        )
        logprobs, student = apart(scores, also)
        outputs = loss.compute(_loss_inputs(one, logprobs, entropy, size), settings)
        if entries is not None:
            inputs = TeacherInputs(student, entries.logprobs, one.behaviour_logprobs, tokens)
            outputs = combined(outputs, distillation(inputs, teacher), teacher)
        outputs.loss.backward()  # type: ignore[no-untyped-call]
        for name, part in outputs.metrics.items():
            totals[name] = totals[name] + part if name in totals else part
        after_each()
    for _ in range(longest - len(passes)):
        scorer.idle()
        after_each()
    own = Metrics({name: float(total) for name, total in totals.items()})
    return total_of(ranks.every(own)) | {"trained_tokens": tokens}


def _loss_inputs(one: MicroBatch, logprobs: Tensor, entropy: Tensor, size: StepSize) -> LossInputs:
    kept = one.judged
    columns = {name: column[kept] for name, column in one.columns.items()}
    return LossInputs(
        logprobs=logprobs[kept],
        entropy=entropy[kept],
        behaviour_logprobs=one.behaviour_logprobs[kept],
        advantages=one.advantages[kept],
        sequences=one.sequences[kept],
        sequence_count=one.sequence_count,
        step=size,
        staleness=one.staleness[kept],
        ref_logprobs=columns.get(REFERENCE),
        columns=columns,
    )
