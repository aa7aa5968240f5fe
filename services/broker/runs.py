"""What the run is: from the configuration, then as its trainer registered it, then as it pulls."""

from msgspec.structs import replace

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.delivery import RunInfo
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.services.broker.journal.facts import RunItem
from rolloutmq.services.broker.lineage import Lineage

ANY_RUN = "default"
"""A run name that means whatever run this broker serves."""


class Run:
    """Name, numbers and progress of the run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pulled = 0
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
            batch_sequences=config.trainer.batch_sequences,
            checkpoint_interval=config.trainer.checkpoint_interval,
            total_steps=config.trainer.steps,
        )

    @property
    def name(self) -> str:
        return self.info.run

    @property
    def batch_sequences(self) -> int:
        """Sequences of a batch, by the best knowledge there is: pulls, the trainer, the configuration."""
        told = max(self._pulled, self.info.batch_sequences)
        return told or self._config.trainer.batch_sequences

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

    def pulls(self, version: PolicyVersion) -> None:
        """Note the policy of a trainer that is given a batch."""
        self.lineage.seen(version)
        self.policy = version

    def resumed(self, version: PolicyVersion) -> None:
        """Note that the trainer went back to a checkpoint."""
        self.lineage.resumed(version)
        self.policy = version

    def pulled(self, sequences: int) -> bool:
        """Note the size of a pull; return whether it changes what a batch is."""
        changed = sequences != self._pulled
        self._pulled = sequences
        return changed

    def item(self) -> RunItem:
        """Return all of it for a snapshot; what other parts know of the run is added there."""
        forks = tuple(self.lineage.forks.items())
        pending = self.lineage.pending
        return RunItem(self.info, self._owner, self._pulled, self.policy, forks, (), (), pending)

    def restore(self, item: RunItem) -> None:
        """Become what `item` returned."""
        self.info, self._owner, self._pulled, self.policy = item.info, item.owner, item.pulled, item.policy
        self.lineage.forks.update(item.forks)
        self.lineage.pending = item.pending

    def reset(self) -> None:
        """Forget what was registered and the step."""
        self._pulled = 0
        self._owner = ""
        self.policy = PolicyVersion()
        self.lineage.clear()
        self.info = self._configured()
