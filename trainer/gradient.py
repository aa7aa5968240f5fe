"""From the forward passes of a step to its gradient, which is left in the policy.

A loss is divided by the size of the whole step, over all passes and ranks, so that the parts add up. Passes are taken
together with the other ranks, who cannot gather their parameters otherwise: who has none left goes through idle ones.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from rolloutmq.schemas.training import TrainerConfig
from rolloutmq.trainer.account import Metrics, total_of
from rolloutmq.trainer.collate import MicroBatch
from rolloutmq.trainer.device import device_of
from rolloutmq.trainer.losses.distillation import TaughtInputs, combined, distillation
from rolloutmq.trainer.losses.inputs import LossInputs, StepSize
from rolloutmq.trainer.losses.registry import REFERENCE, find_loss
from rolloutmq.trainer.optimizer import entropy_weight
from rolloutmq.trainer.ranks import Ranks
from rolloutmq.trainer.scoring import Scorer
from rolloutmq.trainer.teaching import apart, taught


def leave_gradient(
    passes: Sequence[MicroBatch],
    step: int,
    config: TrainerConfig,
    scorer: Scorer,
    ranks: Ranks,
    after_each: Callable[[], None],
) -> dict[str, float]:
    """Leave the gradient of a step in the policy; return the metrics of the loss.

    Args:
        passes: Of this rank; none if it has nothing to learn from.
        step: The step, counted from 1.
        config: Names the loss, and what is learned from a teacher beside it.
        scorer: Asks the policy.
        ranks: Who takes the step.
        after_each: Called after each backward pass, idle ones too: nobody is to take this rank for one that hangs.
    """
    loss, teacher = find_loss(config.loss), config.distillation
    settings = config.loss.model_copy(update={"entropy": entropy_weight(config, step)})
    tokens = sum(p.rows.numel() for p in passes)
    judged = sum(int(p.judged.sum()) for p in passes)
    tokens, judged, sequences = ranks.sums(tokens, judged, sum(p.judged_sequences for p in passes))
    # Of what only a teacher speaks, the loss of the rewards knows nothing, not even that it is there.
    size = StepSize(max(1, judged), max(1, sequences))
    longest = ranks.most(len(passes))
    totals: dict[str, Tensor] = {}
    device = device_of(scorer.policy)
    for one in (plain.on(device) for plain in passes):
        told = taught(one, teacher)
        also = told.asked if told else None
        scores, entropy = scorer(
            one.tokens, one.rows, one.positions, one.position_ids, also, one.temperatures
        )
        logprobs, student = apart(scores, also)
        outputs = loss.compute(_loss_inputs(one, logprobs, entropy, size), settings)
        if told is not None:
            inputs = TaughtInputs(student, told.logprobs, one.behaviour_logprobs, tokens)
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
