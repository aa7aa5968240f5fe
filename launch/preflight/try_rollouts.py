"""`rolloutmq try`: rollouts of one environment in this very process, against the configured policy, without a run.

The user's code runs in the main thread, one rollout after the other, and the terminal is its own: `print` and
`breakpoint()` work. The policy is that of `[inference]`: a server elsewhere, or a model of `[model]` that a thread of
this process serves. Nothing is sent, and nothing stays behind.

Exit codes: 0 every rollout gave a group, 1 one failed, 2 invalid configuration or command line, 130 interrupted.
"""

import asyncio
import faulthandler
import json
import logging
import random
import signal
import sys
import time
from bdb import BdbQuit
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from textwrap import indent
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TextIO

from rolloutmq.bus.lifecycle import set_up_logging
from rolloutmq.launch.preflight.hub import dataset_key, described, fetch
from rolloutmq.launch.preflight.raters import silent_raters
from rolloutmq.launch.preflight.standalone import Plan, roll_out
from rolloutmq.launch.preflight.verdicts import Problem
from rolloutmq.launch.preflight.watch import Watch, frames_now
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, PolicyUnavailableError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.printable import printable
from rolloutmq.services.worker import loader, rollouts
from rolloutmq.services.worker.completion import ChatMessage, Completion, TokenIds
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import NoPolicy, Policy
from rolloutmq.services.worker.user_code.failures import (
    UserFailure,
    UserFiles,
    failure_at,
    failure_of,
    first_error,
)
from rolloutmq.services.worker.user_code.process_exits import told_exits

if TYPE_CHECKING:
    from rolloutmq.services.inference.tiny.local import LocalServer

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
PATIENCE_S: Final = 10.0
"""Seconds of retries against a server that does not answer: somebody waits."""
TEXT_CHARS: Final = 160
"""Longest text of tokens in a line."""
IDS_SHOWN: Final = 16
"""Most token ids in a line; `--json` has all."""


@dataclass(frozen=True)
class TryOptions:
    """Options of `try`.

    Attributes:
        count: Number of rollouts.
        size: Sequences of a rollout; 0 for `group_size`.
        payloads: Submitted tasks to answer, in turn.
        as_json: Print one line of JSON for each rollout.
    """

    count: int = 1
    size: int = 0
    payloads: Sequence[Any] = ()
    as_json: bool = False


def try_rollouts(config: RunConfig, env: str, options: TryOptions) -> int:
    """Roll out an environment here, print each rollout, and return the exit code. Blocks; for the main thread.

    Args:
        config: The configuration. Its seed is that of tasks, weights and sampling.
        env: Name of the environment; empty for the only one.
        options: What to do.

    Raises:
        ConfigError: There is no such environment, it is a program, it cannot be loaded, or a model or its data set
            cannot be fetched.
        MissingError: A required package is not installed.
    """
    name = _chosen(config, env)
    files = UserFiles.of(config.base_dir, [config.environment[name]])
    output = sys.stdout
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    with (
        _quiet(),
        _interruptible(),
        told_exits(files, _leaves),
        Watch(files, _tell) as watch,
        _apart(options),
    ):
        watch.begin("asks the hub")
        config, sources = described(config, keys={"model", dataset_key(name)}, tell=_tell)
        watch.begin(f"loads environment {name}")
        environment = _loaded(config, name, files)
        watch.begin("makes the policy")
        fetch(config, sources, tell=_tell)
        with _server(config) as server:
            session = _Session(config, name, options, files, watch, Tokens(server), output)
            return session.run(environment, server)


def payload_of(text: str) -> Any:
    """Return a submitted task of the command line; ConfigError if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError("--task", f"must be JSON (got {text!r:.80}): {error}") from None


def _chosen(config: RunConfig, env: str) -> str:
    """Return the name of the environment to try."""
    if not config.environment:
        raise ConfigError("environment", "there is none; add a section [environment.NAME] with `entry`")
    known = ", ".join(config.environment)
    if not env and len(config.environment) > 1:
        raise ConfigError("ENV", f"required, because there are several environments; name one of {known}")
    name = env or next(iter(config.environment))
    if name not in config.environment:
        raise ConfigError(f"environment.{name}", f"no such section; name one of {known}")
    if config.environment[name].command:
        raise ConfigError(
            f"environment.{name}.command",
            "is a program that rolls out by itself; `try` takes a class with `entry` or a package of verifiers",
        )
    return name


def _loaded(config: RunConfig, name: str, files: UserFiles) -> Any:
    section = config.environment[name]
    try:
        environment = loader.load_environment(name, section, config.base_dir)
        loader.check_abilities(name, section, environment, numbered=name in config.curriculum)
    except ConfigError as error:
        raise Problem.of(error, files).error from error
    return environment


def _server(config: RunConfig) -> "AbstractContextManager[LocalServer | None]":
    """Return the server of this process, if the policy has none elsewhere."""
    if config.inference.kind not in {"tiny", "vllm"}:
        return nullcontext()
    from rolloutmq.services.inference.tiny.local import serving  # imports torch

    if config.inference.kind == "vllm":
        _tell("samples from [model] in this process, without vLLM")
    return serving(config, config.run.seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log warnings alone, and none of the errors that are printed here."""
    set_up_logging()
    level, printed = logging.root.level, (loader.logger, rollouts.logger, logging.getLogger("asyncio"))
    logging.root.setLevel(logging.WARNING)
    for one in printed:
        one.disabled = True
    try:
        yield
    finally:
        logging.root.setLevel(level)
        for one in printed:
            one.disabled = False


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise where the user's code is, not end the task once it waits as `asyncio` does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _apart(options: TryOptions) -> Iterator[None]:
    """Keep what the user's code prints out of the lines of JSON."""
    with redirect_stdout(sys.stderr) if options.as_json else nullcontext():
        yield


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _leaves(failure: UserFailure, status: int) -> int:
    """Tell of code that ends this process; return an exit code that says so."""
    sys.stdout.flush()  # nobody else will
    _tell(f"FAILED: {printable(failure.headline)}\n\n{indent(failure.report, '    ')}")
    return status or EXIT_FAILED


class Tokens:
    """Texts of tokens: those of a tokenizer here, or those that the server elsewhere has named so far.

    Args:
        server: The server of this process, if there is one.
    """

    def __init__(self, server: "LocalServer | None") -> None:
        self._text = server.text if server is not None else None
        self._known: dict[int, str] = {}

    def note(self, completions: Sequence[Completion]) -> None:
        """Learn the texts of sampled tokens."""
        for one in completions:
            if len(one.tokens) == len(one.token_ids):
                self._known.update(zip(one.token_ids, one.tokens, strict=True))

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; empty if it is not known."""
        if (text := self._text) is not None:
            runs = groupby(ids, key=lambda one: bool(text.token(one)))
            return "".join(
                text.shown(list(run)) if is_named else "".join(f"<|{one}|>" for one in run)
                for is_named, run in runs
            )
        return "".join(self._known[one] for one in ids) if all(one in self._known for one in ids) else ""


class NotingPolicy:
    """A policy whose answers teach `Tokens`."""

    def __init__(self, policy: Policy, tokens: Tokens) -> None:
        self._policy = policy
        self._tokens = tokens

    async def complete(self, prompt: str | TokenIds, **sampling: Any) -> list[Completion]:
        """See `Policy.complete`."""
        return self._noted(await self._policy.complete(prompt, **sampling))

    async def chat(self, messages: Sequence[ChatMessage], **sampling: Any) -> list[Completion]:
        """See `Policy.chat`."""
        return self._noted(await self._policy.chat(messages, **sampling))

    async def tokenize(self, text: str) -> list[int]:
        """See `Policy.tokenize`."""
        return await self._policy.tokenize(text)

    async def detokenize(self, tokens: TokenIds) -> str:
        """See `Policy.detokenize`."""
        return await self._policy.detokenize(tokens)

    async def render(self, messages: Sequence[ChatMessage], **how: Any) -> list[int]:
        """See `Policy.render`."""
        return await self._policy.render(messages, **how)

    def endpoint(self) -> AbstractAsyncContextManager[Endpoint]:
        """See `Policy.endpoint`."""
        return self._policy.endpoint()

    def _noted(self, completions: list[Completion]) -> list[Completion]:
        self._tokens.note(completions)
        return completions


class _InterruptedError(Exception):
    """The user has interrupted a rollout or left the debugger; the cause has the place."""


class _AwayError(Exception):
    """No server answers, so no other rollout can succeed."""


class _Session:
    """The rollouts of one call, and what is printed of them."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        options: TryOptions,
        files: UserFiles,
        watch: Watch,
        tokens: Tokens,
        output: TextIO,
    ) -> None:
        self._config = config
        self._name = name
        self._options = options
        self._files = files
        self._watch = watch
        self._tokens = tokens
        self._output = output
        self._number = 0
        self._began = 0.0
        self._groups: list[Group] = []
        self._failed = 0
        self._told: dict[str, int] = {}

    def run(self, environment: Any, server: "LocalServer | None") -> int:
        """Do the rollouts and return the exit code."""
        began = time.monotonic()
        with asyncio.Runner() as runner:
            self._watch.loop = runner.get_loop()
            try:
                runner.run(self._rolled_out(environment, server))
            except (KeyboardInterrupt, _InterruptedError) as error:
                logging.getLogger(
                    "asyncio"
                ).disabled = True  # it would tell of the tasks that are cancelled now
                self._interrupted(error.__cause__ or error, self._watch.loop)
                return EXIT_INTERRUPTED
            except _AwayError:
                pass
            except (Exception, SystemExit) as error:  # noqa: BLE001 - entering, leaving and tasks are user code
                self._print_failure(failure_of(error, self._files))
            finally:
                self._watch.loop = None
        if not self._options.as_json:
            self._print(self._summary(time.monotonic() - began))
        for silent in silent_raters(self._name, environment, self._files):
            _tell(str(silent.error).rstrip())
        return EXIT_FAILED if self._failed else EXIT_DONE

    async def _rolled_out(self, environment: Any, server: "LocalServer | None") -> None:
        options = self._options
        plan = Plan(options.count, seed=self._config.run.seed, size=options.size, payloads=options.payloads)
        async with self._policy(server) as policy:
            self._begin()
            await roll_out(
                self._name,
                self._config,
                environment,
                policy,
                plan,
                on_group=self._on_group,
                on_failure=self._on_failure,
            )

    @asynccontextmanager
    async def _policy(self, server: "LocalServer | None") -> AsyncIterator[Policy]:
        inference = self._config.inference
        if inference.kind == "none":
            yield NoPolicy()
            return
        address = InferenceAddress(url=inference.url if server is None else server.url, pid=0)
        engines = Engines(lambda: [address], random.Random(0))
        async with OpenAIPolicy.opened(engines, patience_s=PATIENCE_S) as policy:
            yield NotingPolicy(policy, self._tokens)

    def _begin(self) -> None:
        self._number += 1
        self._began = time.monotonic()
        self._watch.begin(f"rollout {self._number}")

    def _on_group(self, group: Group) -> None:
        taken_s = time.monotonic() - self._began
        self._groups.append(group)
        if self._options.as_json:
            self._print_json(taken_s, sequences=[_fields(one, self._tokens) for one in _rows(group)])
        else:
            self._print(self._head(f"{group.sequences} sequences, {taken_s:.2f} s"))
            for number, row in enumerate(_rows(group), 1):
                self._print("\n".join(_lines(number, row, self._tokens)))
        self._begin()

    def _on_failure(self, error: BaseException, _why: str) -> None:
        if isinstance(first_error(error), KeyboardInterrupt | BdbQuit):
            raise _InterruptedError from error
        self._print_failure(failure_of(error, self._files))
        if isinstance(first_error(error), PolicyUnavailableError):
            raise _AwayError
        self._begin()

    def _print_failure(self, failure: UserFailure) -> None:
        self._failed += 1
        taken_s = time.monotonic() - self._began
        if self._options.as_json:
            self._print_json(taken_s, error=failure.error, where=failure.where, report=failure.report)
            return
        head = self._head(f"FAILED after {taken_s:.2f} s: {printable(failure.headline)}")
        if (first := self._told.setdefault(failure.headline, self._number)) != self._number:
            self._print(f"{head}, as rollout {first}")
        else:
            self._print(f"{head}\n\n{indent(failure.report, '    ')}\n")

    def _interrupted(self, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        """Print where the user's code was. A second signal does not cut it short."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if isinstance(first_error(error), BdbQuit):
            _tell("ended in the debugger")
            return
        failure = failure_of(error, self._files, "interrupted")
        if not failure.where:
            failure = failure_at(frames_now(self._files, loop), self._files, "interrupted")
        report = f"\n\n{indent(failure.report, '    ')}" if failure.where else ""
        _tell(f"rollout {self._number}: {failure.headline}{report}")

    def _head(self, text: str) -> str:
        return f"rollout {self._number} of {self._options.count}: {text}"

    def _print(self, text: str) -> None:
        self._output.write(f"{text}\n")
        self._output.flush()

    def _print_json(self, taken_s: float, **fields: Any) -> None:
        found = {"env": self._name, "rollout": self._number, "seconds": round(taken_s, 6), **fields}
        self._print(json.dumps(found))

    def _summary(self, taken_s: float) -> str:
        scores = [[float(score) for score in group.scores] for group in self._groups]
        every = [score for group in scores for score in group]
        done = len(scores) + self._failed
        text = f"{done} rollouts of {self._name}: {len(every)} sequences, {taken_s:.1f} s"
        if every:
            text += f", scores {min(every):g} to {max(every):g}, mean {fmean(every):.3f}"
        if self._failed:
            text += f", {self._failed} FAILED"
        if scores and all(len(group) > 1 and len(set(group)) == 1 for group in scores):
            text += "\nall scores of each rollout are equal: a trainer learns nothing from them"
        return text


@dataclass(frozen=True)
class _Row:
    """One sequence of a group."""

    score: float
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    finish_reason: str


def _rows(group: Group) -> Iterator[_Row]:
    reasons = group["stop_reasons"] if "stop_reasons" in group.columns else [""] * group.sequences
    columns = (group["tokens"], group["mask"], group["inference_logprobs"])
    for score, tokens, mask, logprobs, reason in zip(group.scores, *columns, reasons, strict=True):
        given = [int(one) for one in mask]
        yield _Row(float(score), tokens.tolist(), given, logprobs.tolist(), str(reason))


def _fields(row: _Row, tokens: Tokens) -> dict[str, Any]:
    sampled = [token for token, is_sampled in zip(row.tokens, row.mask, strict=True) if is_sampled]
    return {
        "score": row.score,
        "tokens": row.tokens,
        "mask": row.mask,
        "logprobs": row.logprobs,
        "finish_reason": row.finish_reason,
        "text": tokens.shown(sampled),
    }


def _lines(number: int, row: _Row, tokens: Tokens) -> Iterator[str]:
    """Yield a line about a sequence, and one for each run of tokens of the same mask."""
    ends = f", ends by {printable(row.finish_reason)}" if row.finish_reason else ""
    yield f"  {number}  score {row.score:g}, {len(row.tokens)} tokens, {sum(row.mask)} sampled{ends}"
    for mask, places in groupby(range(len(row.tokens)), key=row.mask.__getitem__):
        ids = [row.tokens[place] for place in places]
        more = f" … {len(ids) - IDS_SHOWN} more" if len(ids) > IDS_SHOWN else ""
        text = f"{tokens.shown(ids)!r}  " if tokens.shown(ids) else ""
        if len(text) > TEXT_CHARS:
            text = f"{text[:TEXT_CHARS]}…  "
        yield f"     mask {mask}  {printable(text)}[{' '.join(map(str, ids[:IDS_SHOWN]))}{more}]"
