"""RolloutMQ beside TRL's `GRPOTrainer`: its rollouts are groups of the bus. Needs TRL 1.16 (extra `trl`).

rollouts    `BusRollouts`: the rollout function, the reward function, and the connection to a run
training    one life of a trainer: the batch under way, its rows, its settlement
callback    the trainer's events: begin, optimizer step, checkpoint, end
settings    what a `GRPOConfig` must agree with (pure)
rows        groups as the rows that TRL trains on (pure)
publishing  the trainer's weights, back to the engines of the run
async_worker  `BusRolloutWorker` for TRL's experimental `AsyncGRPOTrainer`; its weights are in `publishing`
"""

from rolloutmq.trainer.integrations.extras import from_extra

with from_extra("trl"):
    from rolloutmq.trainer.integrations.trl.async_worker import BusRolloutWorker
    from rolloutmq.trainer.integrations.trl.publishing import BusWeightTransfer
    from rolloutmq.trainer.integrations.trl.rollouts import BusRollouts
    from rolloutmq.trainer.integrations.trl.training import SCORE

__all__ = ["SCORE", "BusRolloutWorker", "BusRollouts", "BusWeightTransfer"]
