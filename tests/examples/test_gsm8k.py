"""Problems are scored by their number, and a run takes models, tokenizers and names from what it is told."""

import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.support.saved import save_model

from benchmarks.end_to_end import scenario
from rolloutmq.launch.settings import load
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy, play

CONFIG = Path(__file__).parents[2] / "examples" / "gsm8k" / "gsm8k.toml"
LETTERS = "".join(map(chr, range(32, 127))) + "\n"
SMALL: dict[str, Any] = {"hidden_size": 16, "mlp_size": 16, "max_positions": 160, "vocab_size": 128}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return made_up(tmp_path / "problems.jsonl")


def made_up(path: Path) -> Path:
    """Write three problems."""
    made = [
        {"question": f"{a} and {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
        for a, b in [(1, 2), (3, 4), (900, 334)]
    ]
    path.write_text("\n".join(map(json.dumps, made)) + "\n\n")
    return path


def environment(problems: Path, **options: Any) -> Environment:
    told = [f'environment.gsm8k.options={{ problems = "{problems}" }}']
    told += [f"environment.gsm8k.options.{key}={json.dumps(value)}" for key, value in options.items()]
    config = load(CONFIG, environ={}, assignments=told)
    return load_environment("gsm8k", config.environment["gsm8k"], config.base_dir)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("{} #### {}", 1.0),
        ("it is {}.0", 1.0),
        ("{}, no, 7777", 0.1),
        ("-{}", 0.1),
        ("0-{}", 1.0),
        ("no idea", 0.0),
        ("", 0.0),
    ],
)
def test_a_reply_is_worth_its_last_number(problems: Path, reply: str, score: float) -> None:
    def answer(prompt: str) -> str:
        a, _, b = prompt.removeprefix("Question: ").partition("?")[0].partition(" and ")
        return reply.replace("{}", f"{int(a) + int(b):,}")

    group = play(environment(problems, max_tokens=64), ScriptedPolicy(answer), size=2)
    assert list(group.scores) == [score] * 2


def test_a_question_may_be_a_message(problems: Path) -> None:
    policy = ScriptedPolicy("3")
    group = play(environment(problems, chat=True, prompt="Tell: {question}"), policy, size=1)
    assert policy.prompts[0].startswith("Tell: ")
    assert group["messages"][0][-1]["content"] == "3"


def test_answers_with_and_without_a_mark(problems: Path) -> None:
    made: Any = environment(problems)
    assert {one.number for one in made.problems} == {Decimal(3), Decimal(7), Decimal(1234)}
    assert made.task(random.Random(0)) in made.problems


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no problem"),
        ('{"question": "a"}', "problems.jsonl:1: must be an object with `question` and `answer`"),
        ('{"question": "a", "answer": "1"}\n[]', "problems.jsonl:2: must be an object"),
        ('{"question": "a", "answer": "none"}', "problems.jsonl:1: its answer has no number"),
    ],
)
def test_a_file_that_is_wrong_is_said_with_the_line(problems: Path, text: str, why: str) -> None:
    problems.write_text(text)
    with pytest.raises(Exception, match="raised ValueError") as refused:
        environment(problems)
    assert why in str(refused.value)


@pytest.mark.extended
def test_twenty_steps_without_a_teacher(problems: Path, tmp_path: Path) -> None:
    twenty_steps(problems, tmp_path)


def twenty_steps(problems: Path, tmp_path: Path, *assignments: str) -> None:
    """Take them, with further keys of the configuration, and see that every tensor has learned."""
    student = save_model(tmp_path / "student", 1, **SMALL, alphabet=LETTERS)
    code, summary = scenario.run(
        tmp_path / "run",
        [
            *(f"model.path={student}", "model.dtype=float32"),
            f'environment.gsm8k.options={{ problems = "{problems}", max_tokens = 12, prompt = "{{question}}" }}',
            *("trainer.steps=20", "trainer.batch_sequences=16", "trainer.learning_rate=1e-3"),
            *assignments,
        ],
        config=CONFIG,
    )
    assert code == 0
    assert summary["steps"] == 20
    assert summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_dead"] == 0
    layout = RunLayout(tmp_path / "run")
    told = [json.loads(line) for line in layout.metrics.read_text().splitlines()]
    steps = [one for one in told if one["topic"] == "step"]
    assert [one["step"] for one in steps] == list(range(1, 21))
    assert all(one["extra"]["grad_norm"] > 0 and "distill_kl" not in one["extra"] for one in steps)
    assert any(one["reward"] > 0 for one in steps)
    assert not layout.log("teacher").exists()
    before, after = (
        load_file(directory / "model.safetensors")
        for directory in (student, max(layout.checkpoints.glob("step-*")))
    )
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(before)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "alphabet", "kind", "apart"),
    [
        ("sage", LETTERS, "top_k", False),
        ("oracle", LETTERS[::-1], "sampled", True),
    ],
    ids=["sage", "oracle"],
)
def test_twenty_steps_with_models_names_and_tokenizers_of_ones_own(
    problems: Path, tmp_path: Path, name: str, alphabet: str, kind: str, apart: bool
) -> None:
    student = save_model(tmp_path / f"student-of-{name}", 1, **SMALL, alphabet=alphabet)
    teacher = save_model(tmp_path / name, 2, **SMALL, alphabet=alphabet, initializer_range=0.3)
    told = [f"model.name=student-of-{name}"]
    words = student
    if apart:
        for owner, model in (("teacher", teacher), ("model", student)):
            words = tmp_path / f"words-of-{owner}"
            words.mkdir()
            for file in model.glob("tokenizer*"):
                file.rename(words / file.name)
            told.append(f"{owner}.tokenizer={words}")
    code, summary = scenario.run(
        tmp_path / "run",
        [
            *(f"model.path={student}", "model.dtype=float32", f"run.name=learns-from-{name}"),
            *(f"teacher.path={teacher}", f"teacher.name={name}", f"trainer.distillation.kind={kind}"),
            f'environment.gsm8k.options={{ problems = "{problems}", max_tokens = 12, prompt = "{{question}}" }}',
            *("trainer.steps=20", "trainer.batch_sequences=16", "trainer.learning_rate=1e-2", *told),
        ],
        config=CONFIG,
    )
    assert code == 0
    assert summary["steps"] == 20
    assert summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_dead"] == 0
    layout = RunLayout(tmp_path / "run")
    steps = [json.loads(line) for line in layout.metrics.read_text().splitlines()]
    learned = [one["extra"]["distill_kl"] for one in steps if one["topic"] == "step"]
    assert len(learned) == 20
    if kind == "top_k":  # of `sampled` twenty steps show noise
        assert sum(learned[-5:]) < sum(learned[:5])
    assert f"name={name} path={teacher}" in layout.log("teacher").read_text()
    saved = max(layout.checkpoints.glob("step-*"))
    assert (saved / "tokenizer.json").read_bytes() == (words / "tokenizer.json").read_bytes()
