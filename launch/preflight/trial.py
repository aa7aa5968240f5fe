"""Trial of the environments before a run: a process of its own loads each class as a worker would, and draws tasks.

So classes, options, raters and ensembles that cannot work are refused before anything starts, by the key to correct.
Tasks of a `SingleTurn` also show rows that a data set lacks, and characters that a built-in model cannot read.

The user's code runs in that process only, and whatever it starts ends with it. A trial that takes longer than
`PATIENCE_S`, dies, or cannot draw a task refuses nothing: it becomes advice, and the workers find out. Not tried are
programs, environments with GPUs, which only a worker is given, and those whose workers the run does not start.
"""

import random
import secrets
import select
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from inspect import iscoroutine
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

import msgspec

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.services.process.child import KILL_WAIT_S, Process, spawn
from rolloutmq.services.worker.environment import GroupPerTask
from rolloutmq.services.worker.loader import check_abilities, load_environment
from rolloutmq.services.worker.rollouts import one_line
from rolloutmq.services.worker.verifiers.package import module_name
from rolloutmq.services.worker.verifiers.rows import RowEnvironment

PATIENCE_S: Final = 60.0
"""Time for the trial of all environments, in seconds: their modules may import torch."""
GRACE_S: Final = 2.0
"""Time to end after the result, in seconds: threads of the user's code may go on."""
POLL_S: Final = 0.2
DRAWN: Final = 8
"""Tasks drawn by `task`."""
OURS: Final = Path(__file__).parents[2]
"""Directory of this package."""
SPECIAL: Final = ("<pad>", "<bos>", "<eos>")
"""Texts that a built-in model reads as one token each."""
SHOWN_CHARS: Final = 60
"""Longest part of a prompt that an error shows."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trial.

    Attributes:
        path, problem: Key that the run is refused for, and why; empty if all environments load.
        advice: What could not be tried.
    """

    path: str = ""
    problem: str = ""
    advice: tuple[str, ...] = ()


def try_environments(config: RunConfig) -> tuple[str, ...]:
    """Try the environments of a run in another process, and return what could not be tried, a line each.

    Blocks for as long as their modules need to load, at most about `PATIENCE_S`.

    Raises:
        ConfigError: An environment cannot be loaded or lacks a method, a row that the run asks for is missing, or the
            model has no token for a character of a prompt.
    """
    if not tried(config):
        return ()
    with tempfile.TemporaryDirectory(prefix="rolloutmq-trial-") as directory:
        file, result, log = (Path(directory) / name for name in ("config.json", "result.json", "log"))
        write_json(file, config)
        command = (sys.executable, "-m", "rolloutmq.launch.preflight.trial", str(file), str(result))
        spec = ProcessSpec(name="trial", role=Role.WORKER, argv=command, log=str(log))
        ended = _ended(spawn(spec, secrets.token_hex(8)), result)
        if not result.exists():
            return (f"the environments could not be tried, {ended}; their workers will tell",)
        found = msgspec.json.decode(result.read_bytes(), type=Verdict)
    if found.path:
        raise ConfigError(found.path, found.problem)
    return found.advice


def _ended(process: Process, result: Path) -> str:
    """Wait for the end of the process, then end what is left of it; return how it ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    deadline, how = time.monotonic() + PATIENCE_S, ""
    try:
        while not poll.poll(POLL_S * 1000) and not how:
            now = time.monotonic()
            if result.exists():
                deadline = min(deadline, now + GRACE_S)
            if now >= deadline:
                how = f"they took longer than {PATIENCE_S:g} s"
    finally:
        process.send_group(signal.SIGKILL)
        poll.poll(KILL_WAIT_S * 1000)
        ended = process.poll()
        process.close()
    return how or str(ended)


def tried(config: RunConfig) -> list[str]:
    """Return the names of the environments to try."""
    if not config.orchestrator.enabled:
        return []
    return [name for name, env in config.environment.items() if not env.command and not env.gpus]


def verdict_on(config: RunConfig) -> Verdict:
    """Load the environments and draw their tasks; the first problem ends it. Runs the user's code."""
    advice: list[str] = []
    try:
        for name in tried(config):
            section = config.environment[name]
            environment = load_environment(name, section, config.base_dir)
            check_abilities(name, section, environment, numbered=name in config.curriculum)
            _check_rows(config, name, environment)
            if _draws_alone(environment):
                advice += _drawn(config, name, environment)
    except ConfigError as error:
        where = _place(error.__cause__, config.base_dir, _own_modules(config))
        return Verdict(path=error.path, problem=error.problem + (f" ({where})" if where else ""))
    return Verdict(advice=tuple(advice))


def _draws_alone(environment: Any) -> TypeGuard["GroupPerTask[Any]"]:
    """Return whether tasks can be drawn here: a class that a worker enters first may get its data there."""
    if isinstance(environment, RowEnvironment):
        return True
    return isinstance(environment, GroupPerTask) and not isinstance(environment, AbstractAsyncContextManager)


def _own_modules(config: RunConfig) -> set[str]:
    """Return the names of the modules, or packages of modules, in which the environments of a run may be installed."""
    entries = {env.entry.partition(":")[0].partition(".")[0] for env in config.environment.values()}
    return entries | {module_name(env.verifiers) for env in config.environment.values()} - {""}


def _place(error: BaseException | None, base_dir: Path, own: Container[str]) -> str:
    """Return file and line of the user's code that raised: beside the configuration, or else in no library.

    Args:
        error: The error; None for none.
        base_dir: Directory of the configuration.
        own: Installed modules that are the user's, too.
    """
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    files = [(Path(one.filename), one.lineno) for one in frames if Path(one.filename).is_absolute()]
    others = [one for one in files if OURS not in one[0].parents and not _is_of_a_library(one[0], own)]
    near = [one for one in others if base_dir.resolve() in one[0].parents]
    for file, line in (near or others)[-1:]:
        return f"{file.name}, line {line}"
    return ""


def _is_of_a_library(file: Path, own: Container[str]) -> bool:
    """Return whether a file belongs to Python or to an installed package that is not the user's."""
    folders = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
    inner = max((one for one in folders if one in file.parents), key=lambda one: len(one.parts), default=None)
    return inner is not None and Path(file.relative_to(inner).parts[0]).stem not in own


def _check_rows(config: RunConfig, name: str, environment: Any) -> None:
    """Refuse an evaluation that asks a data set for more rows than the task space of the environment has."""
    count, tasks, kind = config.environment[name].task_count, config.evaluation.tasks, type(environment)
    if not count or tasks <= count or name not in config.evaluated:
        return
    if isinstance(environment, GroupPerTask):
        held_out = kind.eval_task_at is not GroupPerTask.eval_task_at
        looked_up, own = kind.task_at is not GroupPerTask.task_at, "eval_task_at"
        held_out = held_out or kind.rollout_eval is not GroupPerTask.rollout_eval
    else:
        held_out, own = hasattr(environment, "rollout_eval"), "rollout_eval"
        looked_up = hasattr(environment, "rollout_at")
    if looked_up and not held_out:
        raise ConfigError(
            "evaluation.tasks",
            f"must not exceed environment.{name}.task_count {count}, because {kind.__name__} has no `{own}` and is "
            f"asked for the tasks of its task space (got {tasks}); lower it, or give the class `{own}`",
        )


class _Draw(NamedTuple):
    """How to draw one task.

    `key` is the key that says how many tasks there are, and `number` that of the last one; both are empty for a task
    that any environment has.
    """

    method: str
    task: Callable[[], Any]
    key: str = ""
    number: int = 0


def _draws(config: RunConfig, name: str, environment: "GroupPerTask[Any]") -> Iterator[_Draw]:
    section, evaluated, kind = config.environment[name], name in config.evaluated, type(environment)

    def is_ours(method: str) -> bool:
        """Return whether the rollout draws and asks as `GroupPerTask` does."""
        return getattr(kind, method) is getattr(GroupPerTask, method)

    def numbered(method: str, key: str, count: int, seed: object) -> Iterator[_Draw]:
        for index in sorted({0, count - 1}):
            rng = random.Random(f"{seed}/{name}/task {index}")
            call = partial(getattr(environment, method), index, rng)
            yield _Draw(method, call, key if index else "", index)

    if name in config.curriculum and is_ours("rollout_at"):
        key = f"environment.{name}.task_count"
        yield from numbered("task_at", key, section.task_count, config.run.seed)
    elif section.tasks != "submitted" and not (evaluated and section.split == "eval") and is_ours("rollout"):
        for number in range(DRAWN):
            yield _Draw("task", partial(environment.task, random.Random(f"trial/{name}/{number}")))
    if evaluated and is_ours("rollout_eval"):
        seed = f"evaluation {config.evaluation.seed}"
        yield from numbered("eval_task_at", "evaluation.tasks", config.evaluation.tasks, seed)


def _drawn(config: RunConfig, name: str, environment: "GroupPerTask[Any]") -> Iterator[str]:
    """Draw tasks and check their prompts; yield advice on the first that cannot be drawn, whose cause may be rare."""
    alphabet = _alphabet(config)
    for draw in _draws(config, name, environment):
        try:
            task = draw.task()
            if iscoroutine(task):
                task.close()
                return
            texts = list(_texts(environment.prompt(task)))
        except Exception as error:  # user code may raise anything
            if draw.key and isinstance(error, LookupError):
                raise ConfigError(
                    draw.key,
                    f"{type(environment).__name__}.{draw.method} of environment {name} has no task {draw.number}, it "
                    f"raised {one_line(error)} (got {draw.number + 1}); lower it to the number of tasks",
                ) from error
            yield f"environment.{name}.entry: drawing a task by `{draw.method}` raised {one_line(error)}"
            return
        for text in texts if alphabet else ():
            _check_characters(text, alphabet, name)


def _alphabet(config: RunConfig) -> str:
    """Return the characters of the model; empty if they are those of a tokenizer."""
    built = not config.model.path and config.inference.kind in {"tiny", "vllm"}
    return config.model.alphabet if built else ""


def _texts(prompt: Any) -> Iterator[str]:
    """Yield the texts of a prompt: none of token ids."""
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
        texts = (part.get("text") for part in parts if isinstance(part, dict))
        yield from (text for text in texts if isinstance(text, str))


def _check_characters(text: str, alphabet: str, name: str) -> None:
    left = text
    for special in SPECIAL:
        left = left.replace(special, "")
    if missing := [each for each in dict.fromkeys(left) if each not in alphabet]:
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
        raise ConfigError(
            "model.alphabet",
            f"lacks {', '.join(map(repr, missing))} of the prompt {shown!r} of environment {name} (got {alphabet!r}); "
            "add the characters",
        )


def main(file: str, result: str) -> int:
    """Try the environments for another process, and write the verdict to a file; return the exit code."""
    config = RunConfig.model_validate_json(Path(file).read_bytes())
    write_json(Path(result), verdict_on(config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
