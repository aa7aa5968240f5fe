"""Rollouts of an environment in a test, as a worker makes them: into a list, or to a broker.

The environment meets what it meets in a run: permits, numbered tasks, a time-out, and the checks of what it returns.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rolloutmq.bus.blocking import note_failed_close
from rolloutmq.bus.producer.client import DRAIN_S, Producer
from rolloutmq.bus.producer.open_producers import open_producers
from rolloutmq.bus.transport.time_limit import time_limit, within
from rolloutmq.launch.preflight import standalone
from rolloutmq.launch.preflight.standalone import Plan
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.errors import MissingError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.services.process.blocking_call import run_blocking
from rolloutmq.services.worker.policy import Policy
from rolloutmq.testing.ledger import run_dir_of

if TYPE_CHECKING:
    from rolloutmq.testing.ledger import Run

TIMEOUT_S: Final = 60.0


def roll_out(
    environment: Any,
    policy: Policy,
    groups: int,
    *,
    size: int = 4,
    seed: int = 0,
    tasks: Sequence[Any] = (),
    env: str = "test",
    to: "Run | None" = None,
    timeout_s: float | None = TIMEOUT_S,
) -> list[Group]:
    """Roll out an environment until it has given so many groups. Blocks, also in the cell of a notebook.

    `roll_out_async` has the same arguments and errors.
    """
    return run_blocking(
        roll_out_async(
            environment,
            policy,
            groups,
            size=size,
            seed=seed,
            tasks=tasks,
            env=env,
            to=to,
            timeout_s=timeout_s,
        )
    )


async def roll_out_async(
    environment: Any,
    policy: Policy,
    groups: int,
    *,
    size: int = 4,
    seed: int = 0,
    tasks: Sequence[Any] = (),
    env: str = "test",
    to: "Run | None" = None,
    timeout_s: float | None = TIMEOUT_S,
) -> list[Group]:
    """Roll out an environment until it has given so many groups, one after the other.

    Args:
        environment: The environment; an async context manager is entered and left.
        policy: Answers, such as a `ScriptedPolicy`.
        groups: Number of groups.
        size: Sequences of a group.
        seed: Seed of the tasks, as `run.seed`.
        tasks: Submitted tasks to answer, in turn; empty: the environment draws its own.
        env: Name of the environment, also of its lane in the broker.
        to: Broker for tests, or run directory, that gets the groups; None: nobody. The broker has acked all of them
            when the call returns.
        timeout_s: Longest wait in seconds; None waits without a limit.

    Raises:
        Exception: What the environment raised in the first failed rollout; later ones are not made. It has a note if
            leaving the environment failed, too.
        MissingError: The run directory does not exist.
        UsageError: `groups` or `size` is below 1, or `to` is neither a broker nor a directory.
        WaitTimeoutError: There are fewer groups after `timeout_s`, for example because a rollout hangs or the broker
            gives no permit.
    """
    for name, count in (("groups", groups), ("size", size)):
        if count < 1:
            raise UsageError(f"{name}: must be at least 1 (got {count})")
    limit_s = time_limit("timeout_s", timeout_s)
    made: list[Group] = []
    failed: list[tuple[BaseException, str]] = []
    async with AsyncExitStack() as stack:
        producer = None if to is None else await stack.enter_async_context(_producer(to, env, size, limit_s))
        work = standalone.roll_out(
            env,
            validate({"environment": {env: {"entry": "environment.py:Environment", "group_size": size}}}),
            environment,
            policy,
            Plan(groups, seed=seed, payloads=tasks, ends_with_failure=True),
            on_group=made.append,
            on_failure=lambda error, why: failed.append((error, why)),
            outlet=producer,
        )

        def problem() -> str:
            credit = "" if producer is None else f", and credit is limited by {producer.wait.value}"
            return f"{len(made)} of {groups} groups are there{credit}"

        try:
            await within(limit_s, "roll_out", work, problem)
        except Exception as error:
            if not failed:
                raise
            note_failed_close(failed[0][0], error)  # leaving the environment must not hide why it failed
        if failed:
            _raise(*failed[0])
        if producer is not None:
            await within(
                limit_s, "roll_out", producer.flush(), lambda: f"{producer.unacked} groups are unacked"
            )
    return made


@asynccontextmanager
async def _producer(to: "Run", env: str, size: int, limit_s: float | None) -> AsyncIterator[Producer]:
    """Open a producer with a name of its own, so calls that run at once do not fence each other."""
    layout = RunLayout(run_dir_of(to, "to"))
    if not layout.root.is_dir():
        raise MissingError(str(layout.root), "start a broker there, or pass a LocalBroker", "is no directory")
    name = open_producers.claim(env)
    try:
        async with Producer.open(
            layout.root,
            env=env,
            producer=name,
            group_size=size,
            ack_log=layout.ack_log(name),
            drain_s=DRAIN_S if limit_s is None else min(limit_s, DRAIN_S),
            timeout_s=limit_s,
        ) as producer:
            yield producer
    finally:
        open_producers.release(name)


def _raise(error: BaseException, why: str) -> NoReturn:
    """Raise what the environment raised. Its end or its cancellation is not that of the test."""
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"the rollout failed: {why}") from error
