"""SkyRL's trainers on the bus: which groups a step used, when they are settled, and what a checkpoint commits.

    load checkpoint -> join the bus -> publish the weights
    collect groups -> optimizer step -> sync of the weights -> publish -> settle;  checkpoint -> commit

Mix one of the classes into a trainer of SkyRL, before it in the list of bases. The groups of a step are settled once
its weights are published, or before a checkpoint is written, whichever comes first: as trained, or as filtered if every
token of them is masked. Groups that SkyRL drops are filtered at once: SkyRL collects others for the same step, and what
is held takes their room. A trainer that comes back begins a new incarnation from the step of its checkpoint, and the
broker delivers again what was settled later.

A step for which no trajectory came is not taken: the training ends with the reason. If SkyRL's own filters mask all
that came, SkyRL steps as it does without the bus: its losses are 0 then.

The policy version of a group is `PolicyVersion(incarnation, step)`, where `step` counts finished optimizer steps. It is
SkyRL's `global_step` but for one case: with `sample_full_batch` SkyRL saves an exhausted epoch under the number of the
step that it has yet to take. So each checkpoint has the number of its steps in `STEPS`, and a trainer that comes back
continues from there.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final

from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.integrations.checkpoints import make_durable, next_life
from rolloutmq.trainer.integrations.extras import from_extra
from rolloutmq.trainer.integrations.failed_steps import naming_groups
from rolloutmq.trainer.integrations.skyrl.generator import BusGenerator
from rolloutmq.trainer.integrations.skyrl.inference import ExternalInference
from rolloutmq.trainer.integrations.skyrl.rows import why_nothing_came

with from_extra("skyrl"):
    from skyrl.backends.skyrl_train.utils.io import io

logger = logging.getLogger(__name__)

Publish = Callable[[PolicyVersion], Awaitable[None] | None]
"""Publishes the weights as a version. A plain function runs in a thread."""
STEPS: Final = "rolloutmq_steps.txt"
"""File of a checkpoint with the number of optimizer steps that its weights have had."""
TRACKER: Final = "latest_ckpt_global_step.txt"
"""SkyRL's file with the number of its newest checkpoint."""


class BusTraining:
    """Mixin for `RayPPOTrainer` and its subclasses; `generator` must be a `BusGenerator`.

    Attributes:
        publish: Publishes the weights after each step; None leaves that to SkyRL.
        bus_version: Policy of the last settlement.
    """

    publish: Publish | None = None
    bus_version = PolicyVersion()
    _joined = False
    _resumed_steps: int | None = None
    _trained: tuple[list[str], list[str]] | None = None
    """Instances of the present step: used, and masked whole."""
    _dropping: tuple[Future[None], ...] = ()
    """Settlements of groups that SkyRL has dropped."""

    # What SkyRL's trainers have, for type checkers.
    cfg: Any
    generator: BusGenerator
    dispatch: Any
    inference_engine_client: Any
    global_step: int
    has_critic: bool
    total_training_steps: int | None

    async def train(self) -> None:
        """Train to the end, then leave the bus."""
        try:
            with naming_groups(self._step_groups):
                await super().train()  # type: ignore[misc]
                await self._all_dropped()
        finally:
            await asyncio.to_thread(self.generator.close)

    def _step_groups(self) -> tuple[int, list[str]]:
        """Return the number of the step under way, and its groups."""
        uids = [] if self._trained is None else self._trained[0]
        return self._version.step, self.generator.group_ids(uids) if uids else []

    def init_weight_sync_state(self) -> None:
        """Put the publication behind SkyRL's sync of the weights; without engines of SkyRL's, in its place."""
        sends = not (
            isinstance(self.inference_engine_client, ExternalInference) and self.dispatch is not None
        )
        if sends:
            super().init_weight_sync_state()  # type: ignore[misc]
        self.dispatch = _Dispatch(self.dispatch, self._synced, self.inference_engine_client, sends=sends)

    def load_checkpoints(self) -> Any:
        """Load SkyRL's checkpoint, and read how many steps it has had."""
        found = super().load_checkpoints()  # type: ignore[misc]
        if found[0]:
            self._resumed_steps = _read_steps(str(found[1]))
        return found

    @property
    def _version(self) -> PolicyVersion:
        """Policy of the weights: after the step whose groups are not settled, if there is one."""
        settled = self.bus_version
        return PolicyVersion(settled.incarnation, settled.step + (self._trained is not None))

    async def _synced(self) -> None:
        if not self._joined:
            await asyncio.to_thread(self._join)
        version = self._version
        if self.publish is not None:
            await _published(self.publish, version)
        await self._settle()

    def _join(self) -> None:
        trainer = self.cfg.trainer
        steps = self.global_step if self._resumed_steps is None else self._resumed_steps
        incarnation = next_life(self.generator.where, str(trainer.ckpt_path), "trainer.ckpt_path")
        version = self.bus_version = PolicyVersion(incarnation, steps)
        self.generator.start(
            version,
            RunInfo(
                batch_sequences=trainer.train_batch_size * self.cfg.generator.n_samples_per_prompt,
                checkpoint_dir=str(trainer.ckpt_path),
                checkpoint_interval=max(0, trainer.ckpt_interval),
                starting_step=version.step,
                total_steps=self.total_training_steps or 0,
                started=True,
            ),
        )
        self._joined = True
        logger.info("joined the bus incarnation=%d step=%d", version.incarnation, version.step)

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        """Note which instances this step learns from.

        Raises:
            ConsumerFencedError: Another trainer has this one's place: its weights must not be published.
            UsageError: No trajectory of the step came; names the setting to change.
        """
        self.generator.require_live()
        learned = {uid for uid, mask in zip(uids, generator_output["loss_masks"], strict=True) if any(mask)}
        if not learned and (problem := why_nothing_came(generator_output["stop_reasons"], self.global_step)):
            raise UsageError(problem)
        self._trained = (sorted(learned), sorted({*uids} - learned))
        return super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]

    def _drop(self, uids: list[str]) -> None:
        """Begin to settle groups that SkyRL has dropped while it collects those of its next step."""
        # Of the present policy: the broker delivers it again if the next step is not covered.
        self._dropping += (self.generator.settlement((), uids, self.bus_version),)

    async def _all_dropped(self) -> None:
        """Wait until all that SkyRL has dropped is settled."""
        dropping, self._dropping = self._dropping, ()
        for settling in dropping:
            await asyncio.wrap_future(settling)

    _drops_the_rest = False
    """What a step does not use will not be used: `generate` is not ahead of it."""

    def _settlement(self) -> Any:
        """Begin to settle the groups of the present step; return the future, or None if there is no step."""
        if self._trained is None:
            return None
        version, (trained, masked) = self._version, self._trained
        settling = self.generator.settlement(trained, masked, version, rest=self._drops_the_rest)
        self.bus_version, self._trained = version, None
        return settling

    async def _settle(self) -> None:
        settling = self._settlement()
        if settling is not None:
            await asyncio.wrap_future(settling)

    def save_checkpoints(self) -> Any:
        """Settle what the checkpoint covers, write it, and commit once it is on disk."""
        settling = self._settlement()
        if settling is not None:
            settling.result()
        steps = self.bus_version.step
        folder = f"{self.cfg.trainer.ckpt_path}/global_step_{self.global_step}"
        if _read_steps(folder) is None:  # else it is that of an exhausted epoch until SkyRL has replaced it
            _write_steps(folder, steps)
        folder = super().save_checkpoints()  # type: ignore[misc]
        for model in ("policy", "critic") if self.has_critic else ("policy",):
            # SkyRL 0.4 may still write, with `async_dist_ckpt_save`.
            self.dispatch.finalize_pending_saves(model)
        _write_steps(folder, steps)
        make_durable(folder, [TRACKER])
        self.generator.commit(self.bus_version)
        return folder


class BusSyncTraining(BusTraining):
    """`BusTraining` for the synchronous `RayPPOTrainer`: whatever a step does not use is filtered."""

    _current_epoch: int
    _drops_the_rest = True
    dynamic_sampling_state: Any

    async def generate(self, input_batch: Any) -> Any:
        """Generate, as tasks of the present epoch, once all that was dropped is settled."""
        self.generator.epoch = self._current_epoch
        await self._all_dropped()
        return await super().generate(input_batch)  # type: ignore[misc]

    def handle_dynamic_sampling(self, generator_output: Any, uids: list[str]) -> Any:
        """Report what SkyRL does not collect, if it samples more for the same step."""
        found = super().handle_dynamic_sampling(generator_output, uids)  # type: ignore[misc]
        if found[2]:
            self._drop(sorted({*uids} - {*self.dynamic_sampling_state.get("collected_uids", ())}))
        return found


class BusAsyncTraining(BusTraining):
    """`BusTraining` for `FullyAsyncRayPPOTrainer`, whose buffer holds groups for later steps."""

    epoch: int

    async def _run_generate_for_a_group_loop(self, generation_output_group_buffer: Any) -> None:
        self.generator.epoch = self.epoch
        await super()._run_generate_for_a_group_loop(generation_output_group_buffer)  # type: ignore[misc]

    def _should_keep_group(self, group: Any) -> bool:
        """Report a group that SkyRL drops, one without variance."""
        keeps: bool = super()._should_keep_group(group)  # type: ignore[misc]
        if not keeps:
            self._drop([group.uid])
        return keeps

    async def _collect_generation_mini_batch(self, *args: Any) -> Any:
        """Report a last mini-batch that is not full, too. Ends once all that was dropped is settled."""
        kept, dropped, exhausted = await super()._collect_generation_mini_batch(*args)  # type: ignore[misc]
        if exhausted:
            self._drop([group.uid for group in kept])
        await self._all_dropped()
        return kept, dropped, exhausted


class _Dispatch:
    """SkyRL's dispatch, whose sync of the weights is followed by `synced`.

    Args:
        dispatch: The dispatch.
        synced: Called after each sync.
        client: Inference client, which counts the versions if nothing is sent.
        sends: The dispatch sends the weights to engines of SkyRL's.
    """

    def __init__(
        self, dispatch: Any, synced: Callable[[], Awaitable[None]], client: Any, *, sends: bool
    ) -> None:
        self._dispatch = dispatch
        self._synced = synced
        self._client = client
        self._sends = sends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)

    # SkyRL 0.4 calls the next two; neither 0.3 nor the simulated dispatch of 0.4 has them.

    def get_timing_metrics(self) -> dict[str, float]:
        """Return the dispatch's own timings."""
        found: dict[str, float] = getattr(self._dispatch, "get_timing_metrics", dict)()
        return found

    def finalize_pending_saves(self, model: str) -> None:
        """Wait until checkpoints of the model are on disk."""
        finish = getattr(self._dispatch, "finalize_pending_saves", None)
        if finish is not None:
            finish(model)

    async def save_weights_for_sampler(self, *args: Any, **kwargs: Any) -> None:
        """Send the weights if SkyRL has engines, then call `synced`."""
        if self._sends:
            await self._dispatch.save_weights_for_sampler(*args, **kwargs)
        else:
            self._client.increment_weight_version()
        await self._synced()


async def _published(publish: Publish, version: PolicyVersion) -> None:
    if inspect.iscoroutinefunction(publish):
        await publish(version)
        return
    made = await asyncio.to_thread(publish, version)
    if inspect.isawaitable(made):
        await made


def _write_steps(folder: str, steps: int) -> None:
    io.makedirs(folder, exist_ok=True)
    with io.open_file(f"{folder}/{STEPS}", "w") as file:
        file.write(str(steps))


def _read_steps(folder: str) -> int | None:
    """Return the steps of a checkpoint; None if it does not tell: it was written without the bus."""
    path = f"{folder}/{STEPS}"
    if not io.exists(path):
        return None
    with io.open_file(path, "r") as file:
        text = file.read()
    return int(text) if text.isdecimal() else None
