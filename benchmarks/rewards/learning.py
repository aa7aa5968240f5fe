"""A whole run, and how well the policy of each of its checkpoints sorts digits it never saw.

The evaluation set is fixed: so many tasks of each length, drawn with a seed of its own and answered greedily. The
groups up to a checkpoint are those that the trainer's log names: trained on or filtered.
"""

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import ScenarioError
from rolloutmq.bus.rundir import read_run
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Continuation, Job
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.tiny.generate import Generator
from rolloutmq.services.inference.tokenizer import TextTokenizer
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.services.worker.completion import Completion

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "sort_mix.toml"
HELD_OUT: Final = 64
"""Tasks of each length in the evaluation set."""
EVALUATION_SEED: Final = "evaluation"
DEADLINE_S: Final = 600.0


@dataclass(frozen=True)
class Point:
    """One checkpoint: groups the trainer had pulled, and the mean score on the evaluation set."""

    step: int
    groups: int
    score: float


@dataclass(frozen=True)
class Course:
    """One run."""

    groups: int
    filtered: int
    points: tuple[Point, ...]

    @property
    def filtered_share(self) -> float:
        """Share of the pulled groups that taught nothing."""
        return self.filtered / self.groups

    def groups_to(self, score: float) -> float:
        """Return the groups of the first checkpoint with that score; infinite if there is none."""
        return next((float(point.groups) for point in self.points if point.score >= score), float("inf"))


def run(directory: Path, seed: int, assignments: Sequence[str] = (), example: Path = EXAMPLE) -> RunLayout:
    """Run an example to its end; return its run directory. Blocks for about a minute.

    Raises:
        ScenarioError: It ended with an error, or not in time.
    """
    flags = ("--seed", str(seed))
    code, summary = scenario.run(directory, assignments, flags=flags, config=example, deadline_s=DEADLINE_S)
    if code:
        raise ScenarioError(f"the run in {directory} ended with {code}: {summary['ended']}")
    return RunLayout(directory)


def course(layout: RunLayout) -> Course:
    """Return the course of an ended run of the example `sort_mix`; its policies are evaluated here."""
    groups = filtered = 0
    pulled: dict[int, int] = {}
    for batch in read_lines(layout.trained, SettledBatch):
        groups += len(batch.trained) + len(batch.filtered)
        filtered += len(batch.filtered)
        pulled[batch.version.step] = groups
    environment = _environment(read_run(layout.root)[0].base_dir)
    found = evaluated(layout, environment, held_out(), environment.score)
    points = tuple(Point(step, pulled[step], score) for step, score in found)
    return Course(groups, filtered, points)


def evaluated(
    layout: RunLayout, environment: Any, tasks: Sequence[str], score: Callable[[str, Completion], float]
) -> Iterator[tuple[int, float]]:
    """Yield each checkpoint's step and the mean score of its greedy answers to these tasks of an environment."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    text = TextTokenizer(layout.model)
    shape: Any = AutoConfig.from_pretrained(layout.model, local_files_only=True)
    policy: Any = AutoModelForCausalLM.from_config(shape).eval()
    prompts = [text.encode(environment.prompt(task)) for task in tasks]
    for checkpoint in sorted(layout.checkpoints.glob("step-*")):
        policy.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
        generator = Generator(policy, _Still(), [shape.eos_token_id], text.decode)
        job = Job(prompts, Sampling(temperature=0.0, max_tokens=environment.max_tokens))
        generator.generate([job], lambda _done: None)
        answers = [_completion(text, prompt, one) for prompt, one in zip(prompts, job.results, strict=True)]
        scores = [score(task, answer) for task, answer in zip(tasks, answers, strict=True)]
        yield int(checkpoint.name.removeprefix("step-")), sum(scores) / len(scores)


def held_out(lengths: Sequence[int] = (2, 3, 4, 5)) -> list[str]:
    """Return the evaluation set."""
    rng = random.Random(EVALUATION_SEED)
    return ["".join(rng.choices("0123456789", k=length)) for length in lengths for _ in range(HELD_OUT)]


def _completion(text: TextTokenizer, prompt: list[int], one: Continuation) -> Completion:
    """Return an answer as a worker gets it from the engine."""
    return Completion(
        text=text.decode(one.token_ids),
        prompt_token_ids=prompt,
        token_ids=one.token_ids,
        logprobs=one.logprobs,
        finish_reason="stop" if one.stopped else "length",
        tokens=[text.token(token) for token in one.token_ids],
    )


def _environment(base_dir: Path) -> Any:
    spec = importlib.util.spec_from_file_location("sort_mix_evaluated", base_dir / "sort_mix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SortMix()


class _Still:
    """Weights that nobody changes."""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        yield

    @contextmanager
    def reading(self) -> Iterator[PolicyVersion]:
        yield PolicyVersion()
