"""The curriculum service: for each environment with a curriculum it keeps a few tasks open, and hears their outcomes.

Each environment has its own task, client and files; see `core` for the states of a task, and `event_log` for what
survives a kill. A broker that is away is waited for. What a broker has forgotten, after a crash without durability, is
submitted again under the same id. An environment whose tasks fail one after another ends the run, as one does whose
rollouts fail. Each life of the service counts from 0, without the tasks that had failed before it: the user who resumes
a run has repaired its environment.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.bus.tasks.client import Task, TaskClient
from rolloutmq.bus.transport.pubsub import RunPublisher
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import EnvironmentFailedError, TasksFullError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus
from rolloutmq.schemas.wire.telemetry import CurriculumProgress
from rolloutmq.services.curriculum.core import Curriculum, Identity
from rolloutmq.services.curriculum.event_log import EventLog
from rolloutmq.services.curriculum.samplers.registry import make_sampler, space_of
from rolloutmq.services.process.lock import only_one
from rolloutmq.services.process.runner import Stop, run_service

logger = logging.getLogger(__name__)

ROOM_S: Final = 5.0
"""Wait for room at a broker with too many open tasks, before it is logged."""
NEW_CONFIGURATION: Final = "the curriculum was configured anew"


def curriculum_of(config: RunConfig, env: str) -> Curriculum:
    """Return the curriculum of an environment, as new.

    Raises:
        ConfigError: Its sampler cannot be made.
    """
    section, space, environment = config.curriculum[env], space_of(config, env), config.environment[env]
    source = environment.entry or environment.verifiers
    identity = Identity(
        env=env,
        # A text, because options may have values that msgpack has not. Secrets in them are references.
        environment=f"{source} {json.dumps(environment.options, sort_keys=True, default=str)}",
        run_seed=config.run.seed,
        task_count=space.count,
        levels=space.levels,
        sampler=section.sampler,
        options=section.options,
        seed=space.seed,
        scores=section.scores,
    )
    return Curriculum(space, make_sampler(config, env), identity, config.groups_ahead(env))


class TaskSupply:
    """Keeps the tasks of one environment open. For one event loop.

    Args:
        config: The configuration of the run.
        layout: Its run directory.
        env: The environment.
        report: Called with the curriculum after every few outcomes.
    """

    def __init__(
        self, config: RunConfig, layout: RunLayout, env: str, report: Callable[[Curriculum], None]
    ) -> None:
        self._env = env
        self._where = layout.root
        self._section = config.curriculum[env]
        self._failure_limit = config.environment[env].failure_limit
        self._report = report
        self._reported = -1
        self._life = f"curriculum-{env}-{secrets.token_hex(4)}"
        self._full = LogThrottle()
        self._failures = 0
        self.curriculum = curriculum_of(config, env)
        self._log = EventLog(layout.curricula, self.curriculum)
        self._foreign = self._log.load()

    async def run(self) -> None:
        """Submit tasks and hear their outcomes until cancelled.

        Raises:
            EnvironmentFailedError: Too many tasks in a row failed.
            ConfigError: The sampler of another package raised.
            UnusablePathError: The state cannot be written, for example because the disk is full.
        """
        async with TaskClient.open(self._where) as client:
            await self._catch_up(client)
            self._tell()
            while True:
                await self._refill(client)
                found = await client.results(list(self.curriculum.open), enough=1)
                for status in self._hear(found):
                    self._count(status)
                await self._submit_lost(client, found)

    async def _catch_up(self, client: TaskClient) -> None:
        """Cancel the tasks of an older configuration, and hear what has ended since the life before."""
        if self._foreign:
            await client.cancel(self._foreign, NEW_CONFIGURATION)
            self._log.begin()
        found = await client.results(list(self.curriculum.open), 0.0)
        self._hear(found)
        await self._submit_lost(client, found)

    async def _refill(self, client: TaskClient) -> None:
        drawn = self.curriculum.refill(self._life)
        if drawn is not None:
            self._log.append(drawn)
            await self._submit(client, drawn.tasks)

    async def _submit(self, client: TaskClient, tasks: dict[str, int]) -> None:
        """Submit tasks once there is room for them."""
        new = [
            Task(env=self._env, id=name, index=index, priority=self._section.priority)
            for name, index in tasks.items()
        ]
        while True:
            try:
                await client.submit(new, wait_s=ROOM_S)
                return
            except TasksFullError as error:
                if self._full.is_due(error.detail, time.monotonic()):
                    logger.warning("waiting for room for tasks env=%s error=%s", self._env, error)

    def _hear(self, found: Sequence[TaskStatus]) -> list[TaskStatus]:
        """Apply outcomes in the order of the tasks; return the tasks that have ended."""
        ended = [status for status in found if status.over and status.state is not TaskState.UNKNOWN]
        for status in ended:
            event = self.curriculum.ended(status)
            self._log.append(event)
            if not event.sequences:
                logger.warning(
                    "task ended without a group env=%s task=%s state=%s reason=%s",
                    self._env,
                    event.id,
                    event.state,
                    event.reason,
                )
        if self.curriculum.figures.outcomes >= self._reported + self._section.report_every:
            self._tell()
        return ended

    async def _submit_lost(self, client: TaskClient, found: Sequence[TaskStatus]) -> None:
        """Submit tasks again that the broker does not know."""
        unknown = {
            status.id: self.curriculum.open[status.id]
            for status in found
            if status.state is TaskState.UNKNOWN
        }
        if unknown:
            logger.info(
                "submitting tasks again that the broker does not know env=%s tasks=%d",
                self._env,
                len(unknown),
            )
            await self._submit(client, unknown)

    def _count(self, status: TaskStatus) -> None:
        """Count the failures in a row of this life. A task that expired or was cancelled is none, and ends no row."""
        if status.state is TaskState.DONE:
            self._failures = 0
        if status.state is not TaskState.FAILED:
            return
        self._failures += 1
        if self._failures >= self._failure_limit:
            raise EnvironmentFailedError(self._env, self._failures, status.reason)

    def _tell(self) -> None:
        self._reported = self.curriculum.figures.outcomes
        self._report(self.curriculum)


class Reports:
    """Publishes the progress of the curricula, and keeps it in `curriculum.json`."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._known: dict[str, CurriculumProgress] = {}
        self._publisher = RunPublisher(layout)
        self._publisher.follow()

    def tell(self, curriculum: Curriculum) -> None:
        """Publish the progress of one curriculum; an event is lost while the broker is away."""
        progress = progress_of(curriculum, time.time())
        self._known[progress.env] = progress
        write_json(self._layout.curriculum, [self._known[env] for env in sorted(self._known)])
        self._publisher.publish(topics.telemetry("curriculum", progress.env), progress)

    def close(self) -> None:
        """Close the socket."""
        self._publisher.close()


def progress_of(curriculum: Curriculum, now: float) -> CurriculumProgress:
    """Return the progress of a curriculum; `now` is the wall clock."""
    figures, identity = curriculum.figures, curriculum.identity
    share = 1.0 / figures.recent if figures.recent else None
    return CurriculumProgress(
        env=identity.env,
        sampler=identity.sampler,
        at=now,
        levels=identity.levels,
        open=len(curriculum.open),
        drawn=figures.drawn,
        outcomes=figures.outcomes,
        flat=figures.flat,
        failed=figures.failed,
        dropped=figures.dropped,
        success=None if share is None else figures.success * share,
        flat_share=None if share is None else figures.flat_share * share,
        level=None if share is None else figures.level * share,
    )


async def serve(config: RunConfig, layout: RunLayout, stop: Stop) -> None:
    """Run the curricula of a run until `stop`.

    Raises:
        EnvironmentFailedError: The tasks of an environment fail one after another.
        RunDirInUseError: Another process runs the curricula.
        DamagedFileError: A state on file is damaged.
    """
    with only_one(layout.root / "curriculum.lock", Role.CURRICULUM.value):
        reports = Reports(layout)
        supplies = [TaskSupply(config, layout, env, reports.tell) for env in config.curriculum]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one.run(), name="task supply") for one in supplies]
                await stop.wait()
                for task in running:
                    task.cancel()
            for one in supplies:
                reports.tell(one.curriculum)
        finally:
            reports.close()


def main(run_dir: Path) -> int:
    """Run the service until asked to stop; return its exit code."""

    async def run(stop: Stop) -> None:
        await serve(*load_run(run_dir), stop)

    return run_service(Role.CURRICULUM.value, run)
