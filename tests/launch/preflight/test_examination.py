"""Every method of an environment is tried before a run: what can never work is refused by its key."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tests.launch.preflight.support import CLASSES, config

from rolloutmq.launch.preflight.examination import Examination
from rolloutmq.launch.preflight.verdicts import Verdict
from rolloutmq.schemas.config.run import RunConfig


def examined(config: RunConfig, timeout_s: float = 60.0) -> Verdict:
    return Examination(config, "e", timeout_s=timeout_s).verdict()


def passes(config: RunConfig) -> bool:
    found = examined(config)
    return not found.problems and not found.failures and not found.advice


def refused(config: RunConfig) -> str:
    first, *_ = examined(config).problems
    return f"{first.path}: {first.problem}"


@pytest.mark.parametrize(
    ("kind", "environment", "problem"),
    [
        (
            "typo.py:Typo",
            {},
            "environment.e.entry: importing typo.py raised ConfigError: rewards.weights.b: no rater has this name; "
            "raters: a (typo.py:5)",
        ),
        ("Good", {"options": {"x": 1}}, "environment.e.options: got an unexpected keyword argument 'x'"),
        ("Goood", {}, "environment.e.entry: tried.py has no class `Goood`; did you mean `Good`?"),
        ("Unscored", {}, "environment.e.entry: Unscored does not implement `score`"),
        ("Broken", {}, "environment.e.entry: Broken() raised ValueError: no key (tried.py:"),
        (
            "Weightless",
            {"options": {"weights": {"a": 0.0}}},
            "environment.e.entry: Weightless() raised ConfigError: rewards.raters: must have weights that add up to "
            "more than 0 (got 0); give one a weight (tried.py:",
        ),
        (
            "Own",
            {"rewards": {"raters": {"c": {"rater": "exact"}}}},
            "environment.e.rewards.raters: Own has its own `rewards`; remove them",
        ),
        (
            "Good",
            {"rewards": {"raters": {"c": {"rater": "exact"}}}},
            "environment.e.rewards.raters: Good has its own `score`, which they would replace; remove one",
        ),
        ("Looked", {"group_deadline_s": 1.0}, "environment.e.group_deadline_s: Looked has no method `task`"),
    ],
)
def test_a_class_that_cannot_work_is_refused_by_its_key(
    kind: str, environment: dict[str, Any], problem: str, base_dir: Path
) -> None:
    found = refused(config(base_dir, kind, environment))
    assert found.startswith(problem)
    assert "\n" not in found


@pytest.mark.parametrize("kind", ["Plus", "Chat"])
def test_characters_that_the_model_does_not_know_are_named(kind: str, base_dir: Path) -> None:
    found = refused(config(base_dir, kind))
    assert re.match(
        r"model\.alphabet: lacks '\+' of the prompt '.*' of environment e \(got '0123456789= '\); add", found
    )
    assert passes(config(base_dir, kind, model={"alphabet": "0123456789=+"}))


def test_characters_are_known_of_a_built_model_alone(base_dir: Path) -> None:
    assert passes(config(base_dir, "Ids"))
    assert passes(config(base_dir, "Turns")), "its rollout has prompts of its own"
    external = {"kind": "external", "url": "http://127.0.0.1:9/v1"}
    assert passes(config(base_dir, "Plus", inference=external))


EVALUATION = {"enabled": True, "tasks": 4}


@pytest.mark.parametrize(
    ("kind", "environment", "sections", "problem"),
    [
        (
            "Rows",
            {"task_count": 3},
            {"evaluation": EVALUATION},
            "evaluation.tasks: must not exceed environment.e.task_count 3, because Rows has no `eval_task_at`",
        ),
        (
            "Looked",
            {"task_count": 3},
            {"evaluation": EVALUATION},
            "evaluation.tasks: must not exceed environment.e.task_count 3, because Looked has no `rollout_eval`",
        ),
        (
            "Rows",
            {},
            {"evaluation": EVALUATION},
            "evaluation.tasks: Rows.eval_task_at of environment e has no task 3, it raised IndexError: list index out "
            "of range (got 4); lower it",
        ),
        (
            "Rows",
            {"task_count": 9},
            {"curriculum": {"e": {}}},
            "environment.e.task_count: Rows.task_at of environment e has no task 8",
        ),
    ],
)
def test_rows_that_are_not_there_are_refused(
    kind: str, environment: dict[str, Any], sections: dict[str, Any], problem: str, base_dir: Path
) -> None:
    assert refused(config(base_dir, kind, environment, **sections)).startswith(problem)


def test_rows_that_are_there_pass(base_dir: Path) -> None:
    held_out = config(base_dir, "HeldOut", {"task_count": 3}, evaluation=EVALUATION, curriculum={"e": {}})
    assert passes(held_out)
    drawn = config(base_dir, "Good", {"task_count": 3}, evaluation=EVALUATION)
    assert passes(drawn)
    assert passes(config(base_dir, "Rows", {"task_count": 3}, evaluation={**EVALUATION, "tasks": 3}))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("Unlucky", r"drawing a task by `task` raised KeyError: 'no such dataset' \(tried\.py:\d+\)"),
        (
            "PromptRaises",
            r"`PromptRaises\.prompt` raised IndexError: tuple index out of range \(tried\.py:\d+\)",
        ),
    ],
)
def test_an_environment_that_draws_no_task_is_refused(kind: str, problem: str, base_dir: Path) -> None:
    found = refused(config(base_dir, kind))
    assert re.fullmatch(rf"environment\.e\.entry: {problem} in 8 of 8 draws", found)


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("Promptless", "None"),
        ("PromptNumber", "42"),
        ("PromptBytes", "b'1='"),
        ("PromptEmpty", "[]"),
        ("PromptMessage", "{'role': 'user', 'content': '1='}"),
        ("PromptAsync", "a coroutine: it must not be `async def`"),
    ],
)
def test_a_prompt_of_another_kind_is_refused_with_the_method(kind: str, got: str, base_dir: Path) -> None:
    (problem,) = examined(config(base_dir, kind)).problems
    said = f"`{kind}.prompt` must return text, token ids or messages (got {got})"
    line = next(at for at, text in enumerate(CLASSES.splitlines(), 1) if text == f"class {kind}(Good):") + 1
    assert problem.problem == f"{said} (tried.py:{line}) in 8 of 8 draws"
    assert problem.report.splitlines() == [
        f"tried.py:{line}: in prompt",
        f"    {'async ' if kind == 'PromptAsync' else ''}def prompt(self, task):",
        f"E   {said}",
    ]


def test_a_task_that_is_a_coroutine_is_refused_with_the_method(base_dir: Path) -> None:
    (problem,) = examined(config(base_dir, "TaskAsync")).problems
    said = "`TaskAsync.task` must return a task (got a coroutine: it must not be `async def`)"
    assert problem.problem.startswith(f"every scripted rollout failed: {said} (tried.py:")
    assert "    async def task(self, rng):" in problem.report.splitlines()
    members = config(base_dir, "TaskAsync", {"group_deadline_s": 9.0})
    assert passes(members), "a task of members may be awaited"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("Endless", "`Endless.max_tokens` must be a positive integer (got 0)"),
        ("Spelled", "`Spelled.max_tokens` must be a positive integer (got '4')"),
        ("Cold", "`Cold.temperature` must be a finite number of at least 0 (got -1)"),
        (
            "Numbered",
            "`Numbered.stop` must be non-empty text in UTF-8, a list of such texts, or None (got 5)",
        ),
        (
            "Unstopped",
            "`Unstopped.stop` must be non-empty text in UTF-8, a list of such texts, or None (got '')",
        ),
    ],
)
def test_an_attribute_of_another_kind_is_refused_by_its_name(kind: str, problem: str, base_dir: Path) -> None:
    external: dict[str, Any] = {
        "inference": {"kind": "external", "url": "http://127.0.0.1:9/v1"},
        "trainer": {"enabled": False},
    }
    for sections in ({}, external):
        found = refused(config(base_dir, kind, **sections))
        assert found == f"environment.e.entry: every scripted rollout failed: {problem}"


def test_a_task_that_cannot_always_be_drawn_is_told(base_dir: Path) -> None:
    (base_dir / "tried.py").write_text(
        "from rolloutmq import SingleTurn\n\n\nclass Seldom(SingleTurn):\n    drawn = 0\n\n"
        "    def task(self, rng):\n        self.drawn += 1\n        return 1 // (self.drawn - 3)\n\n"
        "    def prompt(self, task):\n        return '1='\n\n"
        "    def score(self, task, completion):\n        return 0.0\n"
    )
    found = examined(config(base_dir, "Seldom"))
    assert not found.problems
    (told,) = found.failures
    assert (
        "raised ZeroDivisionError: integer division or modulo by zero (tried.py:9) in 1 of 8 draws"
        in told.problem
    )


def test_an_environment_is_entered_before_its_rollouts(base_dir: Path) -> None:
    assert refused(config(base_dir, "Managed")).startswith(
        "environment.e.entry: every scripted rollout failed: KeyError: 'no such dataset' (tried.py:"
    )
    (told,) = examined(config(base_dir, "Unentered")).failures
    assert told.problem.startswith("entering or leaving it raised OSError: no sandbox (tried.py:")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("Raises", "ZeroDivisionError: division by zero (tried.py:"),
        ("Unnumbered", "column scores: `Unnumbered.score` must return a finite number (got None) (tried.py:"),
        ("Written", "column scores: `Written.score` must return a finite number (got '0.5') (tried.py:"),
        ("Recursive", "RecursionError: maximum recursion depth exceeded"),
        ("Misnamed", "AttributeError: 'Completion' object has no attribute 'txet'"),
        ("Synchronous", "TypeError: `rollout` must be `async def` (it returned list)"),
    ],
)
def test_an_error_of_every_rollout_is_refused(kind: str, problem: str, base_dir: Path) -> None:
    assert refused(config(base_dir, kind)).startswith(
        f"environment.e.entry: every scripted rollout failed: {problem}"
    )


def test_an_error_that_no_encoding_has_is_told(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest would send the captured log, with the raw text, to another process: that fails.
    monkeypatch.setattr(logging.getLogger("rolloutmq.services.worker.rollouts"), "propagate", False)
    assert refused(config(base_dir, "Surrogate")).startswith(
        "environment.e.entry: every scripted rollout failed: ValueError: bad ? (tried.py:"
    )


def test_the_report_has_the_frame_the_task_and_the_completion(base_dir: Path) -> None:
    (problem,) = examined(config(base_dir, "Raises")).problems
    frame, source, error, _, task, prompt, completion = problem.report.splitlines()
    assert re.fullmatch(r"tried\.py:\d+: in score", frame)
    assert source == "    return 1 / (len(task) - 2)"
    assert error == "E   ZeroDivisionError: division by zero"
    assert re.fullmatch(r"task        \(\d+, \d+\)", task)
    assert re.fullmatch(r"prompt      '\d+=\d+'", prompt)
    assert re.fullmatch(r"completion  '.*' \(\d+ tokens, (stop|length)\)", completion)


def test_turns_that_are_tokenized_again_are_found(base_dir: Path) -> None:
    (told,) = examined(config(base_dir, "Retold")).failures
    assert re.search(
        r"does not begin with the turns before it: token \d+ is \d+ '2', was 2 '<eos>'; continue the sampled tokens",
        told.problem,
    )
    assert passes(config(base_dir, "Continued"))


def test_an_error_now_and_then_refuses_nothing(base_dir: Path) -> None:
    found = examined(config(base_dir, "Third"))
    assert not found.problems
    (told,) = found.failures
    assert told.problem.startswith("a scripted rollout failed: KeyError: 'third' (tried.py:")


def test_what_a_script_may_have_caused_refuses_nothing(base_dir: Path) -> None:
    """Another model than a built one answers differently; only what no answer causes is certain."""
    external: dict[str, Any] = {
        "inference": {"kind": "external", "url": "http://127.0.0.1:9/v1"},
        "trainer": {"enabled": False},
    }
    found = examined(config(base_dir, "Raises", **external))
    assert not found.problems
    assert "ZeroDivisionError" in found.failures[0].problem
    assert "NameError: name 'answr' is not defined" in refused(config(base_dir, "Unnamed", **external))


def test_turns_that_do_not_continue_are_certain_with_the_token_ids_of_a_built_model(base_dir: Path) -> None:
    found = refused(config(base_dir, "Retokenized"))
    assert "the turn's prompt does not begin with the turns before it: token " in found
    external = {"kind": "external", "url": "http://127.0.0.1:9/v1"}
    other = examined(config(base_dir, "Retokenized", inference=external, trainer={"enabled": False}))
    assert (other.problems, other.failures) == ((), ()), "a chat template may keep the end of a turn"


EXTERNAL: dict[str, Any] = {
    "inference": {"kind": "external", "url": "http://127.0.0.1:9/v1"},
    "trainer": {"enabled": False},
}


@pytest.mark.parametrize("sections", [{}, EXTERNAL])
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("TextAsMessages", "messages: must be a list of messages (got '1=')"),
        ("AnswerAgain", "messages: with `after`, must be only those since its last answer"),
        ("TurnsAgain", "prompt: with `after`, must be only the tokens behind its turns"),
        ("AfterCompletion", "after: must be a Trajectory (got Completion); pass Trajectory.of(completion)"),
    ],
)
def test_a_policy_that_is_called_as_none_may_be_is_refused(
    kind: str, problem: str, sections: dict[str, Any], base_dir: Path
) -> None:
    found = refused(config(base_dir, kind, **sections))
    assert found.startswith(f"environment.e.entry: every scripted rollout failed: {problem}")
    assert re.search(r"\(tried\.py:\d+\)$", found)


@pytest.mark.parametrize("message", [{"content": False}, {"content": 5}, {"content": [5]}, {}])
def test_a_message_without_content_is_refused_as_servers_do(message: dict[str, Any], base_dir: Path) -> None:
    found = refused(config(base_dir, "Message", {"options": message}))
    assert "messages: content must be a string, or a list of parts of type text" in found
    assert "messages[0].content: must be a text or a list of parts" in refused(
        config(base_dir, "Message", {"options": message}, **EXTERNAL)
    )


def test_an_environment_with_a_client_of_its_own_is_loaded_and_no_more(base_dir: Path) -> None:
    found = examined(config(base_dir, "Client"))
    assert (found.problems, found.failures) == ((), ())
    assert str(found.advice[0].error).startswith(
        "environment.e: no scripted rollout: endpoint: a scripted policy has no server"
    )
    own = config(base_dir, "Raises", inference={"kind": "none"}, trainer={"enabled": False})
    assert examined(own).problems == (), "it samples by itself"


@pytest.mark.parametrize(
    ("kind", "sections", "problem"),
    [
        (
            "Wide",
            {},
            r"the prompt has 5001 tokens and max_tokens is 16 \(got 128\); raise it to at least 5017, ",
        ),
        (
            "Wordy",
            {},
            r"the prompt has \d tokens and max_tokens is 999 \(got 128\); raise it to at least 100\d, ",
        ),
        (
            "Twice",
            {},
            r"the prompt has 6\d tokens and max_tokens is 70 \(got 128\); raise it to at least 13\d, ",
        ),
        (
            "WideChat",
            {},
            r"the prompt has 301 tokens and max_tokens is 16 \(got 128\); raise it to at least 317, ",
        ),
        (
            "LongChat",
            {},
            r"the prompt has 6\d tokens and max_tokens is 70 \(got 128\); raise it to at least 13\d, ",
        ),
        (
            "Good",
            {"model": {"max_positions": 18}},
            r"the prompt has \d tokens and max_tokens is 16 \(got 18\); raise",
        ),
    ],
)
def test_rollouts_longer_than_the_context_of_a_built_model_are_refused(
    kind: str, sections: dict[str, Any], problem: str, base_dir: Path
) -> None:
    found = refused(config(base_dir, kind, **sections))
    assert re.match(
        rf"model\.max_positions: is too small for the rollouts of environment e: {problem}", found
    )
    external: dict[str, Any] = {
        "inference": {"kind": "external", "url": "http://127.0.0.1:9/v1"},
        "trainer": {"enabled": False},
    }
    assert passes(config(base_dir, kind, **{**sections, **external})), "its context is not known here"


def test_a_rollout_that_is_longer_than_the_context_now_and_then_is_told(base_dir: Path) -> None:
    found = examined(config(base_dir, "Growing"))
    assert not found.problems
    (told,) = found.failures
    assert (
        "a scripted rollout failed: policy: request refused with status 400: the context has 128"
        in told.problem
    )


def test_raters_that_all_raise_are_refused_with_their_frames(base_dir: Path) -> None:
    (problem,) = examined(config(base_dir, "Unratable")).problems
    assert re.match(
        r"every scripted rollout failed: rewards: too few ratings of an answer \(got 0, min_raters 1\): a: "
        r"ValueError: no key; b: returned no finite number \(float nan\) \(tried\.py:\d+\)",
        problem.problem,
    )
    frame, source, *_ = problem.report.splitlines()
    assert re.fullmatch(r"tried\.py:\d+: in keyless", frame)
    assert source == '    raise ValueError("no key")'


def test_raters_that_a_network_or_another_answer_may_help_refuse_nothing(base_dir: Path) -> None:
    (told,) = examined(config(base_dir, "Unreachable")).failures
    assert "min_raters 1): a: ConnectionError: no judge; b: returned no finite number" in told.problem
    assert "in unreachable\n" in told.report
    external: dict[str, Any] = {
        "inference": {"kind": "external", "url": "http://127.0.0.1:9/v1"},
        "trainer": {"enabled": False},
    }
    found = examined(config(base_dir, "Unratable", **external))
    assert not found.problems
    assert "a: ValueError: no key" in found.failures[0].problem
    (advice,) = examined(config(base_dir, "Opinionless")).advice
    assert advice.problem.startswith("no scripted rollout: rewards: too few ratings")


@pytest.mark.parametrize(
    ("kind", "why", "source"),
    [
        ("keyless", "ValueError: no key", '    raise ValueError("no key")'),
        ("infinite", "returned no finite number (float nan)", "    def infinite(task, answer):"),
        ("worded", "returned no finite number (str 'good')", "    def worded(task, answer):"),
        ("late", "took longer than timeout_s (0.05 s)", "    async def late(task, answer):"),
    ],
)
def test_a_rater_that_never_rates_is_told_with_its_frames(
    kind: str, why: str, source: str, base_dir: Path
) -> None:
    found = examined(config(base_dir, "Paired", {"options": {"kind": kind}}))
    assert (found.problems, found.failures) == ((), ())
    (told,) = found.advice
    assert told.path == "environment.e"
    assert re.fullmatch(
        rf"rater b rated none of 8 answers: {re.escape(why)} \(tried\.py:\d+\); only other raters make the score",
        told.problem,
    )
    place, shown, *_ = told.report.splitlines()
    assert place.endswith(f": in {kind}")
    assert shown.strip() == source.strip()
    assert examined(config(base_dir, "Paired", {"options": {"kind": "silent"}})).advice == (), "no opinion"


def test_a_temperature_of_zero_is_advised_against(base_dir: Path) -> None:
    (told,) = examined(config(base_dir, "Greedy")).advice
    assert told.problem.startswith("`Greedy.temperature` is 0, so all answers of a group are the same")
    distilled = {"distillation": {"kind": "top_k"}}
    assert examined(config(base_dir, "Greedy", trainer=distilled)).advice == ()


def test_a_breakpoint_is_refused_with_its_place(base_dir: Path) -> None:
    found = refused(config(base_dir, "Debugged"))
    assert re.match(
        r"environment\.e\.entry: has a breakpoint\(\) at tried\.py:\d+; remove it, or debug with `roll", found
    )


def test_code_that_waits_is_told_with_its_place(base_dir: Path) -> None:
    (told,) = examined(config(base_dir, "Waiting"), timeout_s=3.5).failures
    assert re.match(
        r"its scripted rollouts took longer than .* s, at tried\.py:\d+; raise --timeout", told.problem
    )
    assert "await asyncio.Event().wait()" in told.report


def test_slow_code_that_works_is_advised_against_with_its_place(base_dir: Path) -> None:
    found = examined(config(base_dir, "Slow"), timeout_s=6.0)
    assert (found.problems, found.failures) == ((), ())
    (told,) = found.advice
    assert re.match(
        r"its scripted rollouts took longer than 2 s, 2 of 4 were done, at tried\.py:\d+; ", told.problem
    )
    assert "await asyncio.Event().wait()" in told.report


def test_rollouts_of_wrong_sections_are_left_out(base_dir: Path) -> None:
    assert Examination(config(base_dir, "Raises"), "e", rolled=False).verdict() == Verdict(env="e")
