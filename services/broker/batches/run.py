"""State of the run: its name, batch size, policy and progress.

It starts from the configuration, follows the trainer's registration, and then the trainer's pulls.
"""

from collections import deque
from typing import Final

from msgspec.structs import replace

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.policy_lineage import PolicyLineage
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.services.broker.batches.leases import Lease
from rolloutmq.services.broker.journal.format.events import RunSnapshot

ANY_RUN = "default"
"""A run name that matches every run."""
RECENT_BATCHES: Final = 16
"""Batches by tokens in the mean of sequences: enough to be steady, few enough to follow a growing policy."""


class RunState:
    """Name, numbers and progress of the run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pulled = 0
        self.batch_tokens = 0
        """Token budget of a batch; 0 if batches are pulled by sequences."""
        self._recent: deque[int] = deque(maxlen=RECENT_BATCHES)
        self._owner = ""
        self.policy = PolicyVersion()
        """The trainer's policy of the last lease or settlement."""
        self._waiting = PolicyVersion()
        """That of a pull; a restart forgets it until the next one."""
        self.lineage = PolicyLineage()
        self.info = self._configured()

    def _configured(self) -> RunInfo:
        config = self._config
        if not config.trainer.enabled:
            return RunInfo(
                run=config.run.name,
                tracking_project=config.run.tracking_project,
                tracking_group=config.run.tracking_group,
                total_steps=config.trainer.steps,
            )
        return RunInfo(
            run=config.run.name,
            tracking_project=config.run.tracking_project,
            tracking_group=config.run.tracking_group,
            batch_sequences=config.batch_sequences,
            checkpoint_interval=config.trainer.checkpoint_interval,
            total_steps=config.trainer.steps,
        )

    @property
    def name(self) -> str:
        return self.info.run

    @property
    def batch_sequences(self) -> int:
        """Sequences of a batch, from the best source: pulls, the trainer's registration, the configuration.

        With batches by tokens it is the mean of the recent ones; before the first, the announced number.
        """
        if self._recent:
            return max(1, round(sum(self._recent) / len(self._recent)))
        announced = max(self._pulled, self.info.batch_sequences)
        return announced or self._config.batch_sequences

    def serves(self, run: str) -> bool:
        """Return whether a request that names this run is at the right broker."""
        return run in {ANY_RUN, self.info.run}

    def registered(self, consumer: str, info: RunInfo) -> None:
        """Adopt the run's numbers from a trainer: the first one that registers, and the same one later."""
        announced = {
            name: value
            for name in RunInfo.__struct_fields__
            if name not in {"run", "started"} and (value := getattr(info, name))
        }
        if self._owner not in {"", consumer} or (self._owner == "" and not announced):
            self.info = replace(self.info, started=True)
            return
        self._owner = consumer
        self.info = replace(self.info, started=True, **announced)
        self.policy = max(self.policy, PolicyVersion(self.policy.incarnation, info.starting_step))

    @property
    def present(self) -> PolicyVersion:
        """The trainer's policy, also of one whose pull waits for its first batch.

        After a restart at durability `memory` the broker knows no policy, and groups sampled at step 0 would all be
        too stale for the trainer.
        """
        return max(self.policy, self._waiting)

    def advanced(self, version: PolicyVersion) -> bool:
        """Note the policy of a pull; return whether the present policy moves on to it."""
        if version <= self.present:
            return False
        self._waiting = version
        return True

    def leased(self, lease: Lease) -> None:
        """Note the policy of a trainer that leases a batch, and the size of the batch."""
        self.lineage.seen(lease.version)
        self.policy, self._waiting = lease.version, PolicyVersion()
        if lease.tokens and not lease.rewound and not lease.short:
            self._recent.append(sum(group.header.sequences for group in lease.groups))

    def resumed(self, version: PolicyVersion) -> None:
        """Note that the trainer resumed from a checkpoint."""
        self.lineage.resumed(version)
        self.policy, self._waiting = version, PolicyVersion()

    def pulled(self, sequences: int, tokens: int = 0) -> bool:
        """Note the size of a pull, one of the two; return whether it changes the batch size."""
        changed = (sequences, tokens) != (self._pulled, self.batch_tokens)
        if changed:
            self._recent.clear()
        self._pulled, self.batch_tokens = sequences, tokens
        return changed

    def item(self) -> RunSnapshot:
        """Return the snapshot record; other parts add their fields."""
        forks = tuple(self.lineage.forks.items())
        pending = self.lineage.pending
        return RunSnapshot(
            self.info,
            self._owner,
            self._pulled,
            self.policy,
            forks,
            (),
            (),
            pending,
            self.batch_tokens,
            tuple(self._recent),
        )

    def restore(self, item: RunSnapshot) -> None:
        """Restore the record that `item` returned."""
        self.info, self._owner, self._pulled, self.policy = item.info, item.owner, item.pulled, item.policy
        if not self._config.trainer.enabled and (steps := self._config.trainer.steps):
            self.info = replace(self.info, total_steps=steps)  # a resumed run may have more
        self.lineage.forks.update(item.forks)
        self.lineage.pending = item.pending
        self.batch_tokens = item.pulled_tokens
        self._recent.extend(item.recent)

    def reset(self) -> None:
        """Forget the registration and the step."""
        self._pulled = self.batch_tokens = 0
        self._recent.clear()
        self._owner = ""
        self.policy = self._waiting = PolicyVersion()
        self.lineage.clear()
        self.info = self._configured()
