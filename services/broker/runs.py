"""What the run is: from the configuration, then as its trainer registered it, then as it pulls."""

from collections import deque
from typing import Final

from msgspec.structs import replace

from rolloutmq.bus.lineage import Lineage
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.delivery import RunInfo
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.services.broker.journal.facts import RunItem
from rolloutmq.services.broker.leases import Lease

ANY_RUN = "default"
"""A run name that means whatever run this broker serves."""
RECENT_BATCHES: Final = 16
"""Batches by tokens whose sequences are averaged: enough to be steady, few enough to follow a policy that grows."""


class Run:
    """Name, numbers and progress of the run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pulled = 0
        self.batch_tokens = 0
        """Budget of the batches that are pulled by tokens; 0 if they are pulled by sequences."""
        self._recent: deque[int] = deque(maxlen=RECENT_BATCHES)
        self._owner = ""
        self.policy = PolicyVersion()
        """The trainer's present policy."""
        self.lineage = Lineage()
        self.info = self._configured()

    def _configured(self) -> RunInfo:
        config = self._config
        if not config.trainer.enabled:
            return RunInfo(
                run=config.run.name,
                tracking_project=config.run.tracking_project,
                tracking_group=config.run.tracking_group,
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
        """Sequences of a batch, by the best knowledge there is: pulls, the trainer, the configuration.

        Where batches are pulled by tokens, the mean of the recent ones; before the first, what was told.
        """
        if self._recent:
            return max(1, round(sum(self._recent) / len(self._recent)))
        told = max(self._pulled, self.info.batch_sequences)
        return told or self._config.batch_sequences

    def serves(self, run: str) -> bool:
        """Whether a request that names this run is at the right broker."""
        return run in {ANY_RUN, self.info.run}

    def registered(self, consumer: str, info: RunInfo) -> None:
        """Take over what a trainer tells of the run: the first one, and the same one again."""
        told = {
            name: value
            for name in RunInfo.__struct_fields__
            if name not in {"run", "started"} and (value := getattr(info, name))
        }
        if self._owner not in {"", consumer} or (self._owner == "" and not told):
            self.info = replace(self.info, started=True)
            return
        self._owner = consumer
        self.info = replace(self.info, started=True, **told)
        self.policy = max(self.policy, PolicyVersion(self.policy.incarnation, info.starting_step))

    def leased(self, lease: Lease) -> None:
        """Note the policy of a trainer that is given a batch, and how much the batch holds."""
        self.lineage.seen(lease.version)
        self.policy = lease.version
        if lease.tokens and not lease.rewound and not lease.short:
            self._recent.append(sum(group.header.sequences for group in lease.groups))

    def resumed(self, version: PolicyVersion) -> None:
        """Note that the trainer went back to a checkpoint."""
        self.lineage.resumed(version)
        self.policy = version

    def pulled(self, sequences: int, tokens: int = 0) -> bool:
        """Note the size of a pull, one of the two; return whether it changes what a batch is."""
        changed = (sequences, tokens) != (self._pulled, self.batch_tokens)
        if changed:
            self._recent.clear()
        self._pulled, self.batch_tokens = sequences, tokens
        return changed

    def item(self) -> RunItem:
        """Return all of it for a snapshot; what other parts know of the run is added there."""
        forks = tuple(self.lineage.forks.items())
        pending = self.lineage.pending
        return RunItem(
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

    def restore(self, item: RunItem) -> None:
        """Become what `item` returned."""
        self.info, self._owner, self._pulled, self.policy = item.info, item.owner, item.pulled, item.policy
        self.lineage.forks.update(item.forks)
        self.lineage.pending = item.pending
        self.batch_tokens = item.pulled_tokens
        self._recent.extend(item.recent)

    def reset(self) -> None:
        """Forget what was registered and the step."""
        self._pulled = self.batch_tokens = 0
        self._recent.clear()
        self._owner = ""
        self.policy = PolicyVersion()
        self.lineage.clear()
        self.info = self._configured()
