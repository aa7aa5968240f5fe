"""Samplers by name, their options as configured, and those of other packages."""

import re
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.curriculum.samplers import registry
from rolloutmq.services.curriculum.samplers.learnability import Learnability
from rolloutmq.services.curriculum.samplers.ordered import Uniform
from rolloutmq.services.curriculum.samplers.registry import (
    OURS,
    ForeignSampler,
    check_samplers,
    make_sampler,
    space_of,
)
from rolloutmq.services.curriculum.samplers.sampler import Outcome, Sampler, TaskSpace

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "curriculum.md"


def config(section: Mapping[str, Any] | None = None, **sections: Any) -> RunConfig:
    environment = {"entry": "a:B", "task_count": 100, "group_size": 4}
    return validate({"environment": {"e": environment}, "curriculum": {"e": section or {}}, **sections})


def test_every_sampler_of_ours_is_made_from_its_defaults() -> None:
    for name in OURS:
        sampler = make_sampler(config({"sampler": name}), "e")
        assert 0 <= sampler.draw(0) < 100
    assert isinstance(make_sampler(config(), "e"), Learnability)


def test_the_space_is_that_of_the_configuration() -> None:
    space = space_of(config({"levels": 7}, trainer={"steps": 10, "batch_sequences": 16}), "e")
    assert space == TaskSpace(count=100, levels=7, expected=40, seed="0/e")
    assert space_of(config({"seed": 5, "levels": 100}, trainer={"enabled": False}), "e") == TaskSpace(
        count=100, levels=100, expected=0, seed="5/e"
    )


def test_more_levels_than_tasks_are_refused_and_by_default_there_are_no_more() -> None:
    with pytest.raises(
        ConfigError, match=r"^curriculum\.e\.levels: must not exceed environment\.e\.task_count 100"
    ):
        config({"levels": 101})
    small = {
        "environment": {"e": {"entry": "a:B", "task_count": 5, "group_size": 4}},
        "curriculum": {"e": {}},
    }
    assert space_of(validate(small), "e").levels == 5
    assert space_of(config(), "e").levels == 16
    read_back = RunConfig.model_validate_json(validate(small).model_dump_json())
    assert space_of(read_back, "e").levels == 5


@pytest.mark.parametrize(
    ("section", "error"),
    [
        (
            {"sampler": "unifrm"},
            "curriculum.e.sampler: unknown sampler (got 'unifrm'); did you mean `uniform`?",
        ),
        ({"options": {"decay": 2.0}}, "curriculum.e.options.decay: must be `float` <= 1.0 (got 2.0)"),
        (
            {"options": {"x": 1}},
            "curriculum.e.options.x: unknown option; allowed: gain, sharpness, explore, decay, task_decay",
        ),
        (
            {"sampler": "uniform", "options": {"x": 1}},
            "curriculum.e.options.x: unknown option; allowed: none",
        ),
        ({"sampler": "replay", "options": {"beta": 0}}, "curriculum.e.options.beta: must be `float` >= 0.01"),
    ],
)
def test_a_wrong_section_is_refused_by_its_dotted_path(section: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_samplers(config(section))
    assert str(caught.value).startswith(error)


def test_a_space_too_large_to_remember_is_refused_by_the_key_of_its_size() -> None:
    large = validate({"environment": {"e": {"entry": "a:B", "task_count": 1 << 30}}, "curriculum": {"e": {}}})
    with pytest.raises(ConfigError, match=r"^environment\.e\.task_count: must be at most 16777216"):
        check_samplers(large)


def mine(space: TaskSpace, options: Mapping[str, Any]) -> Sampler:
    if options:
        raise RuntimeError("no options, please")
    return Uniform(space)


NOT_CALLABLE = 3


def test_a_sampler_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, value, registry.GROUP)
        for name, value in {
            "mine": f"{__name__}:mine",
            "gone": "no_such_package_of_samplers:factory",
            "wrong": f"{__name__}:NOT_CALLABLE",
        }.items()
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda self: _load(self))
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    made = make_sampler(config({"sampler": "mine"}), "e")
    assert isinstance(made, ForeignSampler)
    assert made.draw(3) == Uniform(TaskSpace(100, seed="0/e")).draw(3)
    for section, error in (
        (
            {"sampler": "min"},
            r"^curriculum\.e\.sampler: unknown sampler .*allowed: .*replay, gone, mine, wrong",
        ),
        (
            {"sampler": "mine", "options": {"a": 1}},
            r"^curriculum\.e\.options: mine raised RuntimeError: no options",
        ),
        (
            {"sampler": "gone"},
            r"^curriculum\.e\.sampler: importing no_such_package\S* raised ModuleNotFoundError",
        ),
        ({"sampler": "wrong"}, r"^curriculum\.e\.sampler: \S+NOT_CALLABLE is not a function"),
    ):
        with pytest.raises(ConfigError, match=error):
            make_sampler(config(section), "e")


@pytest.mark.parametrize(("draw", "state"), [(100, b""), (RuntimeError("no"), b""), (0, "text")])
def test_a_sampler_that_cannot_draw_is_refused_before_the_run(
    draw: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Wrong(draw)
    monkeypatch.setattr(made, "state", lambda: state)
    point = EntryPoint("mine", f"{__name__}:mine", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: lambda _space, _options: made)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(
        ConfigError, match=r"^curriculum\.e\.sampler: mine\.(draw|state) .*then start or resume the run"
    ):
        check_samplers(config({"sampler": "mine"}))


class Wrong:
    """Returns what it is told to, or raises it."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def _answer(self, *_: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    draw = update = state = restore = _answer


OUTCOME = Outcome(0, 2, 0.5, 0.5, flat=False)


@pytest.mark.parametrize(
    ("call", "result", "problem"),
    [
        (lambda one: one.draw(0), 100, "draw must return a task from 0 to 99 (got 100)"),
        (lambda one: one.draw(0), -1, "draw must return a task from 0 to 99 (got -1)"),
        (lambda one: one.draw(0), 0.5, "draw raised TypeError: 'float' object cannot be interpreted"),
        (lambda one: one.draw(0), KeyError(7), "draw raised KeyError: 7; repair the sampler"),
        (lambda one: one.update(OUTCOME), ValueError("x"), "update raised ValueError: x; repair"),
        (lambda one: one.state(), OSError("x"), "state raised OSError: x; repair"),
        (lambda one: one.state(), "text", "state raised TypeError"),
        (lambda one: one.restore(b""), KeyError(7), "restore raised KeyError: 7; repair"),
    ],
)
def test_what_a_sampler_of_another_package_does_wrong_is_an_error_with_its_name(
    call: Any, result: Any, problem: str
) -> None:
    one = ForeignSampler(Wrong(result), "curriculum.e.sampler", "mine", TaskSpace(100))
    with pytest.raises(ConfigError) as caught:
        call(one)
    assert str(caught.value).startswith(f"curriculum.e.sampler: mine.{problem}")


def test_a_sampler_of_another_package_may_draw_integers_of_numpy_and_refuse_a_damaged_state() -> None:
    drawn = ForeignSampler(Wrong(np.int64(7)), "k", "mine", TaskSpace(100)).draw(0)
    assert (drawn, type(drawn)) == (7, int)
    with pytest.raises(ValueError, match="damaged"):
        ForeignSampler(Wrong(ValueError("damaged")), "k", "mine", TaskSpace(100)).restore(b"")


def _load(point: EntryPoint) -> Any:
    if point.name == "gone":
        raise ModuleNotFoundError("No module named 'no_such_package_of_samplers'")
    return globals()[point.value.partition(":")[2]]


def test_the_guide_is_right() -> None:
    page = GUIDE.read_text()
    run, *_ = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    about = validate(tomllib.loads(run))
    check_samplers(about)
    assert space_of(about, "sort").levels == 16
    *_, code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, GUIDE.name, "exec"), names)
    own: Sampler = names["newest"](TaskSpace(10), {})
    assert {own.draw(number) for number in range(100)} == {5, 6, 7, 8, 9}
    for sampler in OURS:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{sampler}` |"))
        with pytest.raises(ConfigError) as caught:
            make_sampler(config({"sampler": sampler, "options": {"?": 1}}), "e")
        for option in caught.value.problem.partition("allowed: ")[2].split(", "):
            assert option in row
