"""Examination of environments in the process of a trial: each class is loaded as a worker would, then rolled out.

The rollouts ask a scripted policy, so every method of the class runs: `task`, `prompt`, `score`, `rollout`, the raters.
An error in all of them refuses the run, unless the script may be its cause. What happens only now and then, and what
took too long, is a failure that a run may survive.

Runs the user's code; `main` writes each verdict into a file as soon as it is known.
"""

import asyncio
import faulthandler
import os
import sys
import threading
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.launch.preflight.draws import check_rows, draw, draws_alone
from rolloutmq.launch.preflight.noted_methods import FAULTS, NOTES, Note, NoteFile, note_methods, silent
from rolloutmq.launch.preflight.raters import silent_raters
from rolloutmq.launch.preflight.scripted import ContextError, is_built, scripted_policy
from rolloutmq.launch.preflight.standalone import Plan, roll_out
from rolloutmq.launch.preflight.verdicts import Problem, Progress, Verdict
from rolloutmq.launch.preflight.watch import frames_now
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    ConfigError,
    InvalidGroupError,
    PolicyRefusedError,
    RatersMissingError,
    RolloutMQError,
    UsageError,
)
from rolloutmq.schemas.group import Group
from rolloutmq.services.worker.environment import SingleTurn
from rolloutmq.services.worker.loader import check_abilities, load_environment
from rolloutmq.services.worker.user_code.exits import contain_exits
from rolloutmq.services.worker.user_code.failures import (
    UserFailure,
    UserFiles,
    failure_at,
    failure_of,
    first_error,
)
from rolloutmq.services.worker.user_code.methods import MethodError
from rolloutmq.services.worker.user_code.process_exits import told_exits

ROLLOUTS: Final = 4
SIZE: Final = 2
"""Most sequences of a scripted rollout."""
ROLLOUT_SHARE: Final = 1 / 3
"""Part of the time of a trial that its rollouts may take: slow tools of an environment should not delay each run."""
MARGIN_S: Final = 1.0
"""Time for the verdict on code that takes too long, before the process is ended."""
LEAST_S: Final = 0.1
SCRIPTED: Final = "its scripted rollouts"
CERTAIN: Final = (NameError, ImportError, BdbQuit)
"""Errors that no answer of a policy can cause."""


class _TooLongError(Exception):
    """The rollouts take too long."""

    def __init__(self, failure: UserFailure) -> None:
        self.failure = failure


class Examination:
    """Examines one environment of a run.

    Args:
        config: Configuration of the run.
        name: Name of the environment.
        rolled: Whether to draw tasks and roll out, too.
        timeout_s: Time-out, in seconds.
        late: Called from another thread with the place of code that takes too long.
        note: Told what runs.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        *,
        rolled: bool = True,
        timeout_s: float = 60.0,
        late: Callable[[Verdict], None] = lambda _verdict: None,
        note: Note = silent,
    ) -> None:
        self._config = config
        self._name = name
        self._section = config.environment[name]
        self._rolled = rolled
        self._timeout_s = timeout_s
        self._late = late
        self._note = note
        self._files = UserFiles.of(config.base_dir, config.environment.values())
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._breakpoints: dict[str, None] = {}
        self._failed: list[tuple[BaseException, UserFailure]] = []
        self._done = 0

    def verdict(self) -> Verdict:
        """Examine the environment; the first kind of problem ends it."""
        key = f"environment.{self._name}.entry"
        with self._no_breakpoints():
            try:
                with self._limited(self._timeout_s - MARGIN_S, "loading it and drawing tasks"):
                    environment, found = self._loaded()
                if self._rolled and not found.problems and (more := self._rolled_out(environment)):
                    found = _joined(found, more)
            except ConfigError as error:
                found = Verdict(env=self._name, problems=(Problem.of(error, self._files),))
        if self._breakpoints:
            where = ", ".join(self._breakpoints)
            text = f"has a breakpoint() at {where}; remove it, or debug with `rolloutmq try`: a worker has no terminal"
            found = _joined(found, Verdict(env=self._name, problems=(Problem(path=key, problem=text),)))
        return found

    def _loaded(self) -> tuple[Any, Verdict]:
        name, config = self._name, self._config
        self._note(f"loading {self._section.entry or self._section.verifiers}")
        environment = self._environment = load_environment(name, self._section, config.base_dir)
        self._note("drawing its tasks")
        if self._note is not silent:
            note_methods(type(environment), self._files, self._note)
        check_abilities(name, self._section, environment, numbered=name in config.curriculum)
        check_rows(config, name, environment)
        if self._rolled and draws_alone(environment):
            return environment, draw(config, name, environment, self._files)
        return environment, Verdict(env=name)

    def _rolled_out(self, environment: Any) -> Verdict | None:
        """Roll out with a scripted policy; None if no script can play the server."""
        given = self._section.tasks == "submitted" and self._name not in self._config.curriculum
        if self._section.verifiers or self._config.inference.kind == "none" or given:
            return None
        self._note(SCRIPTED)
        limit_s = max(LEAST_S, self._timeout_s * ROLLOUT_SHARE)
        with self._limited(limit_s, SCRIPTED):
            try:
                with asyncio.Runner() as runner:
                    runner.run(self._rolling(environment, max(LEAST_S, limit_s - MARGIN_S)))
            except _TooLongError as error:
                return self._too_long(error.failure, SCRIPTED)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - entering and leaving are user code
                self._failed.append((error, failure_of(error, self._files)))
                return self._survived("entering or leaving it raised")
            finally:
                self._loop = None
        return self._judged()

    async def _rolling(self, environment: Any, limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        contain_exits(self._loop)
        size = min(self._section.group_size, SIZE)
        plan = Plan(ROLLOUTS, seed=self._config.run.seed, size=size, timeout_s=limit_s)
        await roll_out(
            self._name,
            self._config,
            environment,
            scripted_policy(self._config),
            plan,
            on_group=self._count,
            on_failure=self._fail,
        )

    def _count(self, _group: Group) -> None:
        self._done += 1

    def _fail(self, error: BaseException, why: str) -> None:
        if isinstance(error, TimeoutError) and why.startswith("took longer"):
            limit_s = self._timeout_s * ROLLOUT_SHARE
            raise _TooLongError(failure_of(error, self._files, f"took longer than {limit_s:g} s"))
        self._failed.append((error, failure_of(error, self._files)))

    def _judged(self) -> Verdict:
        """Return what the rollouts say: refused if all failed, and not because of the script."""
        if not self._failed:
            return Verdict(env=self._name, tried=f"{self._done} scripted rollouts", advice=self._advice())
        if self._done or not all(self._is_certain(error) for error, _ in self._failed):
            return self._survived("a scripted rollout failed:")
        error, first = self._failed[0]
        if isinstance(context := first_error(error), ContextError):
            return self._too_small(context, first)
        text = f"every scripted rollout failed: {first.headline}"
        path = f"environment.{self._name}.entry"
        return Verdict(env=self._name, problems=(Problem(path=path, problem=text, report=first.report),))

    def _too_small(self, error: ContextError, failure: UserFailure) -> Verdict:
        """Return the verdict on rollouts that never fit into the context of a built model."""
        text = (
            f"is too small for the rollouts of environment {self._name}: {error.problem} (got "
            f"{self._config.model.max_positions}); raise it to at least {error.needed}, shorten the prompt, or lower "
            "max_tokens"
        )
        problem = Problem(path="model.max_positions", problem=text, report=failure.report)
        return Verdict(env=self._name, problems=(problem,))

    def _advice(self) -> tuple[Problem, ...]:
        """Return what the rollouts hide: raters that never rate, and sampling without a choice."""
        return (*silent_raters(self._name, self._environment, self._files), *self._greedy())

    def _greedy(self) -> Iterator[Problem]:
        """Yield that a temperature of 0 leaves a group no different answers to learn from."""
        environment, config = self._environment, self._config
        if not isinstance(environment, SingleTurn) or environment.temperature > 0:
            return
        if self._section.split == "train" and not config.trainer.distillation.teaches:
            yield Problem(
                path=f"environment.{self._name}",
                problem=f"`{type(environment).__name__}.temperature` is 0, so all answers of a group are the same, "
                "and so are their scores: a trainer learns nothing from them; set it to 1",
            )

    def _survived(self, what: str) -> Verdict:
        """Return the first failure that the script did not cause, as one that a run may survive."""
        theirs = [one for error, one in self._failed if self._is_theirs(error)]
        if not theirs:
            why = self._failed[0][1].headline
            advice = Problem(path=f"environment.{self._name}", problem=f"no scripted rollout: {why}")
            return Verdict(env=self._name, advice=(advice,))
        path = f"environment.{self._name}.entry"
        problem = Problem(path=path, problem=f"{what} {theirs[0].headline}", report=theirs[0].report)
        return Verdict(env=self._name, failures=(problem,), advice=self._advice() if self._done else ())

    def _is_certain(self, error: BaseException) -> bool:
        """Return whether a run would meet the error, too."""
        first = first_error(error)
        if isinstance(first, RatersMissingError):
            faults = _faults(first)
            return is_built(self._config) and bool(faults) and all(map(self._is_certain, faults))
        if isinstance(first, RolloutMQError):
            return self._is_theirs(error) or (
                isinstance(first, PolicyRefusedError) and is_built(self._config)
            )
        if isinstance(first, TimeoutError | asyncio.CancelledError | OSError):
            return False
        return is_built(self._config) or isinstance(first, CERTAIN) or _is_of_the_worker(first)

    def _is_theirs(self, error: BaseException) -> bool:
        """Return whether the environment raised, returned what cannot be sent, or called as no policy may be called.

        Else the script may be the cause. With the token ids of a built model also the tokens of its turns are as they
        would be.
        """
        first = first_error(error)
        # A plain UsageError is about the call. Its subclasses may be about the answer or, as NoServerError, the script.
        if type(first) is UsageError or isinstance(first, MethodError | ContextError):
            return True
        if isinstance(first, RatersMissingError):
            return bool(_faults(first))
        if isinstance(first, InvalidGroupError):
            return is_built(self._config) or first.column in {"*", "scores"}
        return not isinstance(first, RolloutMQError)

    @contextmanager
    def _no_breakpoints(self) -> Iterator[None]:
        """Note breakpoints instead of stopping at them."""
        before = sys.breakpointhook

        def note(*_args: Any, **_options: Any) -> None:
            frame = sys._getframe(1)
            self._breakpoints[f"{self._files.name(frame.f_code.co_filename)}:{frame.f_lineno}"] = None

        sys.breakpointhook = note
        try:
            yield
        finally:
            sys.breakpointhook = before

    def _too_long(self, failure: UserFailure, what: str) -> Verdict:
        """Return the verdict on code that takes too long."""
        place = f", at {failure.where}" if failure.where else ""
        report = failure.report if failure.where else ""
        if self._done:  # it is slow, and it works
            text = (
                f"{what} {failure.error}, {self._done} of {ROLLOUTS} were done{place}; code that blocks holds up all "
                "rollouts of its worker: await it, or run it in a thread"
            )
            slow = Problem(path=f"environment.{self._name}", problem=text, report=report)
            return Verdict(env=self._name, advice=(slow, *self._advice()))
        problem = Problem(
            path=f"environment.{self._name}.entry",
            problem=f"{what} {failure.error}{place}; raise --timeout of `rolloutmq check` if it is only slow",
            report=report,
        )
        return Verdict(env=self._name, failures=(problem,))

    @contextmanager
    def _limited(self, limit_s: float, what: str) -> Iterator[None]:
        """Call `late` if the block takes longer."""

        def tell() -> None:
            failure = failure_at(
                frames_now(self._files, self._loop), self._files, f"took longer than {limit_s:g} s"
            )
            self._late(self._too_long(failure, what))

        timer = threading.Timer(max(LEAST_S, limit_s), tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _faults(error: RatersMissingError) -> Sequence[BaseException]:
    """Return why each rater failed; none if all had no opinion."""
    return error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else ()


def _is_of_the_worker(error: BaseException) -> bool:
    """Return whether the worker itself raised: it is about what the environment is or returned."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        trace is not None and trace.tb_frame.f_globals.get("__name__") == "rolloutmq.services.worker.rollouts"
    )


def _joined(one: Verdict, other: Verdict) -> Verdict:
    return Verdict(
        env=one.env,
        problems=(*one.problems, *other.problems),
        failures=(*one.failures, *other.failures),
        advice=(*one.advice, *other.advice),
        tried=", ".join(filter(None, (one.tried, other.tried))),
    )


def main(arguments: Sequence[str]) -> int:
    """Examine environments for another process, and append each verdict to a file; return the exit code."""
    file, result, timeout, rolled, *names = arguments
    config = RunConfig.model_validate_json(Path(file).read_bytes())
    path = Path(result)
    notes = NoteFile(path.with_name(NOTES))
    faults = path.with_name(FAULTS).open("wb", buffering=0)
    faulthandler.enable(faults)
    files = UserFiles.of(config.base_dir, config.environment.values())

    def write(line: Progress | Verdict) -> None:
        with path.open("ab") as output:
            output.write(msgspec.json.encode(line) + b"\n")

    def late(verdict: Verdict) -> None:
        with suppress(BaseException):
            write(verdict)
        os._exit(0)  # the code that took too long may not listen to anything else

    def leaves(failure: UserFailure, status: int) -> int:
        notes.note(f"{notes.current}, at {failure.where},")
        return status

    with told_exits(files, leaves):
        for name in names:
            write(Progress(env=name))
            examination = Examination(
                config, name, rolled=rolled == "all", timeout_s=float(timeout), late=late, note=notes.note
            )
            write(examination.verdict())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
