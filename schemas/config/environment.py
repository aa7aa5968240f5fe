"""`[environment.NAME]` and `[curriculum.NAME]`: one environment, its workers, and the choice of its tasks."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolloutmq.schemas.config.base import PROCESSES_LIMIT, Fraction, NameText, Section
from rolloutmq.schemas.config.command import problem_of_placeholders
from rolloutmq.schemas.config.rewards import RewardsConfig

OF_CLASSES: Final = (
    "options",
    "tasks",
    "task_count",
    "min_group_size",
    "group_deadline_s",
    "split",
    "pass_score",
    "rewards",
    "sampling",
    "dataset",
    "liveness_s",
)
"""Keys that a program of one's own does not know: they keep their defaults beside `command`."""
PACKAGE: Final = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w-]*")
"""Package of an environment of `verifiers`, with or without its owner on the hub."""

LEVELS_LIMIT: Final = 1024
"""Most levels of a task space."""
LEVELS: Final = 16
"""Levels of a task space that has as many tasks, unless the section says otherwise."""


class SamplingConfig(Section):
    """`[environment.NAME.sampling]`: how an environment of `verifiers` samples."""

    max_tokens: PositiveInt | None = None
    """Longest answer of a turn, in tokens. None: as the environment says, else as long as the context allows."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature. None: as the environment says, else 1."""
    extra: dict[str, Any] = {}
    """Further fields of each request, such as `chat_template_kwargs`. Only fields that leave the distribution unchanged
    are allowed: of others, such as `top_p`, the trainer could not compute the log-probabilities."""


class DatasetConfig(Section):
    """`[environment.NAME.dataset]`: rows of a data set as the tasks of the environment, read by `datasets`."""

    path: str = ""
    """Data set: a file (`.jsonl`, `.json`, `.parquet` or `.csv`) or a directory of such files, relative to the
    configuration file, or the name of a data set of a hub, such as `openai/gsm8k`."""
    revision: str = ""
    """Branch, tag or commit of a data set of a hub. Empty: its main branch. A resumed run keeps its commit."""
    files: tuple[str, ...] = ()
    """Patterns of the files of a directory or hub that are fetched and read, such as `main/train-*.parquet`: one split,
    `train`. Empty: all, and the data set says which belong to a split."""
    subset: str = ""
    """Subset (configuration) of a data set that has several."""
    split: str = "train"
    """Split with the rows of the training. A single file is one split, `train`."""
    eval_split: str = ""
    """Split with the rows of the evaluation. Empty: the rows held out by `eval_rows`."""
    eval_rows: NonNegativeInt = 0
    """Rows of `split` that are held out for the evaluation. 0 without `eval_split`: the evaluation asks for rows of the
    training."""
    seed: NonNegativeInt = 0
    """Seed of the order of the rows, and so of the held-out ones. It does not depend on `run.seed`: runs of different
    seeds hold out the same rows."""

    @model_validator(mode="after")
    def _one_evaluation(self) -> Self:
        defaults = {key: field.default for key, field in type(self).model_fields.items()}
        if not self.path and self.model_dump() != defaults:
            raise ValueError(
                "path is required in a section `dataset`; name a file, a directory or a data set of a hub"
            )
        if self.eval_split and self.eval_rows:
            raise ValueError(
                f"eval_rows must be 0 with eval_split {self.eval_split!r} (got {self.eval_rows}); set one of them"
            )
        return self


class EnvironmentConfig(Section):
    """`[environment.NAME]`: one environment and its workers."""

    entry: str = ""
    """Class of the environment: `package.module:Class`, or `file.py:Class` relative to the configuration file. Required
    unless `verifiers` or `command` is given."""
    verifiers: str = ""
    """Installed environment package of the `verifiers` hub, in place of a class: `wordle`, or `owner/wordle`. Its
    arguments are `options`. `docs/guides/verifiers.md` describes such environments."""
    sampling: SamplingConfig = SamplingConfig.default()
    command: tuple[str, ...] = ()
    """Program and arguments of each worker, in place of a class: an environment that posts to the gateway, such as one
    of Atropos. It starts in the directory of the configuration file, without a shell. `{worker}`, `{gateway_url}` and
    other placeholders are listed in `docs/guides/programs.md`."""
    variables: dict[str, str] = {}
    """Environment variables of `command`, beside those of the run. Values may have placeholders, or name a secret like
    those of `options`."""
    enough_batches: PositiveInt = 3
    """Batches in the queue at which a program with `command` starts no more rollouts: its `max_batches_offpolicy`.
    The autoscaler counts the time in which a program must not start a rollout as waiting."""
    drain_quiet_s: PositiveFloat = 5.0
    """A draining program with `command` has delivered everything once it posts nothing for this long."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class, or of the `load_environment` of a package; fields of `[env]` for a package of
    verifiers 0.4. `env:NAME` as a value passes the
    environment variable NAME: write secrets such as API keys in this form, and no file, log or status of the run has
    them."""
    group_size: PositiveInt = 8
    """Sequences sampled for one task."""
    weight: NonNegativeFloat = 1.0
    """Share of the batches, relative to the other environments of the split."""
    min_share: Fraction = 0.0
    """Part of every batch reserved for this environment, 0 to 1."""
    high_bytes: NonNegativeInt = 0
    """High-water mark of this environment: its queued, leased and granted bytes stay below it. Only its own workers
    wait for that. 0: no mark."""
    split: Literal["train", "eval"] = "train"
    """Split of its groups. A batch has groups of one split only."""
    min_workers: Annotated[int, Field(ge=0, le=PROCESSES_LIMIT)] = 1
    """Fewest worker processes."""
    max_workers: Annotated[int, Field(gt=0, le=PROCESSES_LIMIT)] = 4
    """Most worker processes."""
    gpus: NonNegativeInt = 0
    """GPUs for each worker process; it sees no others. 0: the run assigns no GPU and hides none."""
    vram_bytes: NonNegativeInt = 0
    """Memory that one worker process uses on each of its GPUs. The orchestrator starts a worker only where this much is
    free. 0: a worker has its GPUs for itself."""
    concurrency: PositiveInt = 8
    """Most concurrent rollouts of one worker. Credit may allow fewer."""
    max_staleness: NonNegativeInt = 4
    """Most optimizer steps between the sampling and the training policy of a group."""
    pacing: bool = True
    """Enforce `max_staleness` ahead: a worker may not start a rollout that would be too stale when it is trained on."""
    stale: Literal["drop", "pass"] = "drop"
    """For a group beyond the bound nevertheless: `drop` counts it as expired, `pass` trains on it and counts it."""
    rollout_timeout_s: PositiveFloat = 600.0
    """A worker abandons a longer rollout."""
    liveness_s: Annotated[float, Field(ge=3.0, allow_inf_nan=False)] | None = None
    """A worker without a heartbeat for this long hangs: it is killed, and restarted like a crashed one. None: it is
    left alone, since an environment may block the worker's event loop for minutes, for example in a long computation.
    Heartbeats come every second while the loop runs. The first one comes after the import of the environment."""
    min_group_size: NonNegativeInt = 0
    """Fewest sequences of a group that is sent at `group_deadline_s`. 0: all of them."""
    group_deadline_s: NonNegativeFloat = 0.0
    """With `min_group_size` sequences at this time a group is sent without the rest, and these count as late members.
    0: wait for all. The environment needs a method `member`, as every `SingleTurn` has."""
    tasks: Literal["own", "submitted", "both"] = "own"
    """Source of tasks. `own`: the environment draws them; `submitted`: a trainer submits them; `both`: submitted ones
    first, own ones while there are none. Submitted tasks need a method `rollout_task`, as every `SingleTurn` has."""
    task_count: Annotated[int, Field(ge=0, le=1 << 62)] = 0
    """Number of tasks in the environment's task space, for `[curriculum.NAME]`. The environment draws task i by a
    generator seeded with i, or returns it from `task_at`. 0: it has none."""
    failure_limit: PositiveInt = 20
    """Failed rollouts in a row after which a worker gives up. The run fails when all workers of an environment have, or
    when so many tasks of its curriculum failed in a row."""
    pass_score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Least score of an answer that passes in the evaluation. None: `evaluation.pass_score`."""
    rewards: RewardsConfig = RewardsConfig.default()
    dataset: DatasetConfig = DatasetConfig.default()

    @property
    def module(self) -> str:
        """Module of the class or of the package of `verifiers`; empty for a file and for a program."""
        source = self.entry.partition(":")[0]
        if source:
            return "" if source.endswith(".py") else source
        return self.verifiers.rpartition("/")[2].replace("-", "_")

    @model_validator(mode="before")
    @classmethod
    def _without_versions(cls, given: Any) -> Any:
        """Groups of a program name no policy version: nothing can be paced, and nothing is too old."""
        if isinstance(given, dict) and given.get("command"):
            return {"pacing": False, "stale": "pass", **given}
        return given

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("entry", "verifiers", "command") if getattr(self, key)]
        if not given:
            raise ValueError(
                "entry is required: name a class; or set `verifiers` to use a package, or `command` to run a program"
            )
        if len(given) > 1:
            one, other = given[:2]
            raise ValueError(
                f"{one} must not be given beside `{other}` (got {getattr(self, one)!r}); remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _program(self) -> Self:
        if not self.command:
            if self.variables:
                raise ValueError("variables are for a program; set `command`, or use `options`")
            return self
        for key in OF_CLASSES:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect on a program; remove it")
        if self.pacing or self.stale != "pass":
            key, value = ("pacing", "false") if self.pacing else ("stale", '"pass"')
            raise ValueError(f"{key} must be {value} with `command`: its groups name no policy version")
        for key, text in self._texts():
            if "\0" in text:
                raise ValueError(f"{key} must not have a null character; remove it")
            if problem := problem_of_placeholders([text]):
                raise ValueError(f"{key} {problem}")
        if wrong := next((name for name in self.variables if not name or "=" in name or "\0" in name), None):
            raise ValueError(f"variables must have names without `=` (got {wrong!r})")
        return self

    def _texts(self) -> Iterator[tuple[str, str]]:
        yield from (("command", text) for text in self.command)
        yield from (("variables", text) for text in self.variables.values())

    @model_validator(mode="after")
    def _package(self) -> Self:
        if not self.verifiers:
            if self.sampling != SamplingConfig.default():
                raise ValueError("sampling is for an environment of `verifiers`; set it in the class")
            return self
        if not PACKAGE.fullmatch(self.verifiers):
            raise ValueError(
                f"verifiers must be the name of an installed package, such as `wordle` or `owner/wordle`, without a "
                f"version (got {self.verifiers!r})"
            )
        if self.dataset.path:
            raise ValueError(
                "dataset has no effect on an environment of `verifiers`, which has its own; remove it"
            )
        if self.rewards.raters:
            raise ValueError(
                "rewards has no effect on an environment of `verifiers`, which has its own; remove it"
            )
        return self

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers must not exceed max_workers {self.max_workers} (got {self.min_workers})"
            )
        if self.split == "eval" and not self.min_workers:
            raise ValueError(
                'min_workers must be at least 1 with split = "eval" (got 0): an evaluation starts no worker; raise it'
            )
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size must not exceed group_size {self.group_size} (got {self.min_group_size})"
            )
        if self.vram_bytes and not self.gpus:
            raise ValueError("vram_bytes is memory of a GPU; set gpus to the number of GPUs for each worker")
        if self.entry and self.entry.count(":") != 1:
            raise ValueError(f"entry must be `package.module:Class` or `file.py:Class` (got {self.entry!r})")
        return self


class CurriculumConfig(Section):
    """`[curriculum.NAME]`: the sampler of the tasks of `[environment.NAME]`; the environment needs a `task_count`."""

    sampler: NameText = "learnability"
    """Sampler: `uniform`, `easy_first`, `competence`, `learnability`, `replay`, or one of another package (entry points
    `rolloutmq.samplers`)."""
    options: dict[str, Any] = {}
    """Keyword options of the sampler; `docs/guides/curriculum.md` lists them."""
    levels: Annotated[int, Field(ge=1, le=LEVELS_LIMIT)] | None = None
    """Number of equal parts of the task space, by task number. Tasks of one level count as similarly difficult: the
    outcome of one helps to judge the others. Number tasks from easy to difficult, as far as you know it. None: 16, or
    as many as there are tasks if they are fewer."""
    ahead: NonNegativeInt = 0
    """Most open tasks, waiting or being rolled out. Few keep the choice fresh; too few leave workers idle. 0: as many
    groups as the environment has in two batches."""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    """Priority of its tasks, beside tasks submitted by a trainer."""
    seed: NonNegativeInt | None = None
    """Seed of the choice. None: `run.seed`."""
    scores: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score, for the success rate: the mean score within this range, as 0 to 1. A score outside
    widens the range from then on."""
    report_every: PositiveInt = 16
    """Outcomes between two events on `telemetry.curriculum.NAME`."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.scores
        if not low < high < float("inf") or low == float("-inf"):
            raise ValueError(f"scores must be a lower and a higher finite number (got {low:g} and {high:g})")
        if low / 2 == high / 2:  # the success rate is measured in halves
            raise ValueError(f"scores must lie further apart (got {low:g} and {high:g}); raise the higher")
        return self
