"""An exception in the user's code is reported as a test runner shows it."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus import lifecycle
from rolloutmq.bus.lifecycle import hide
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.services.worker.scripted import ScriptedPolicy, play
from rolloutmq.services.worker.user_code.failures import (
    ENDS,
    ERROR_CHARS,
    FRAMES,
    VALUE_CHARS,
    UserFiles,
    failure_at,
    failure_of,
    frames_of,
    one_line,
    waiting_frames,
)

CODE = """
import json
import sys

from rolloutmq import SingleTurn


class Sums(SingleTurn):
    def task(self, rng):
        return 3, 4

    def prompt(self, task):
        return "3+4="

    def score(self, task, completion):
        return self.graded(completion.text)

    def graded(self, text):
        return 1 / (len(text) - len(text))


class Parsing(Sums):
    def graded(self, text):
        return json.loads("{")


class Chained(Sums):
    def graded(self, text):
        try:
            return super().graded(text)
        except ZeroDivisionError as error:
            raise ExceptionGroup("several", [ValueError("first"), error]) from error


class Unprintable:
    def __repr__(self):
        raise RuntimeError


class Strange(Sums):
    def task(self, rng):
        return Unprintable()


class Long(Sums):
    def task(self, rng):
        return "x" * 10_000


class Deep(Sums):
    def graded(self, text, depth=9):
        return super().graded(text) if depth == 0 else self.graded(text, depth - 1)


class AnswerError(Exception):
    def __str__(self):
        return self.body["error"]

    def __getattr__(self, name):
        return {"body": {}}[name]


class Refused(Sums):
    def graded(self, text):
        raise AnswerError


class Called:
    def __call__(self, text):
        return 0.0


class Recursive(Sums):
    def graded(self, text):
        return self.graded(text)


def waits():
    return later()


async def later():
    import asyncio
    await asyncio.Event().wait()


def now(frames_of):
    return frames_of(sys._getframe())
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "users_sums.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("users_sums")
    del sys.modules["users_sums"]


def raised(environment: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever the user's code raises
        play(environment, ScriptedPolicy("42"), size=1)
    return caught.value


def test_frames_task_prompt_and_completion_are_shown(code: Any, tmp_path: Path) -> None:
    found = failure_of(raised(code.Sums()), UserFiles(tmp_path))
    line = CODE.splitlines().index("        return 1 / (len(text) - len(text))") + 1
    assert found.error == "ZeroDivisionError: division by zero"
    assert found.where == f"users_sums.py:{line}"
    assert found.headline == f"ZeroDivisionError: division by zero (users_sums.py:{line})"
    assert found.report.splitlines() == [
        f"users_sums.py:{line - 3}: in score",
        "    return self.graded(completion.text)",
        f"users_sums.py:{line}: in graded",
        "    return 1 / (len(text) - len(text))",
        "E   ZeroDivisionError: division by zero",
        "",
        "task        (3, 4)",
        "prompt      '3+4='",
        "completion  '42' (3 tokens, stop)",
    ]


def test_a_library_that_raised_is_shown_and_is_not_the_place(code: Any, tmp_path: Path) -> None:
    found = failure_of(raised(code.Parsing()), UserFiles(tmp_path))
    assert found.where.startswith("users_sums.py:")
    assert re.search(
        r"\n/.*json/decoder\.py:\d+: in raw_decode\n.*\nE   json\.decoder\.JSONDecodeError: ", found.report
    )


def test_a_library_is_no_place_of_the_users_code(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    error = caught.value
    assert error.__traceback__ is not None
    error.with_traceback(error.__traceback__.tb_next)  # as raised below this package
    assert failure_of(error, UserFiles(tmp_path)).where == ""
    sections = [EnvironmentConfig(entry="json.decoder:Any")]
    assert re.search(r"decoder\.py:\d+", failure_of(error, UserFiles.of(tmp_path, sections)).where), (
        "the user's own"
    )


def test_a_package_of_another_environment_is_a_library(tmp_path: Path) -> None:
    files = UserFiles(tmp_path, {"mine"})
    assert not files.has("/opt/other/lib/python3/dist-packages/theirs/code.py")
    assert files.has("/opt/other/lib/python3/dist-packages/mine/code.py")
    assert files.has("/home/me/code.py")


def test_of_a_group_the_first_error_is_told_and_of_a_chain_the_frames(code: Any, tmp_path: Path) -> None:
    error = raised(code.Chained())
    found = failure_of(error, UserFiles(tmp_path))
    assert found.error == "ValueError: first"
    wrapped = RuntimeError("the worker's own")
    wrapped.__cause__ = raised(code.Sums())
    found = failure_of(wrapped, UserFiles(tmp_path), why="took too long")
    assert (found.error, found.where[:13]) == ("took too long", "users_sums.py")
    assert "E   took too long" in found.report


def test_values_are_cut_and_one_without_a_repr_is_named(code: Any, tmp_path: Path) -> None:
    assert (
        "task        <Unprintable without a repr>"
        in failure_of(raised(code.Strange()), UserFiles(tmp_path)).report
    )
    (task,) = (
        line
        for line in failure_of(raised(code.Long()), UserFiles(tmp_path)).report.splitlines()
        if line.startswith("task")
    )
    assert len(task) == len("task        ") + VALUE_CHARS + 1


def test_an_error_whose_own_code_raises_has_a_report(code: Any, tmp_path: Path) -> None:
    found = failure_of(raised(code.Refused()), UserFiles(tmp_path))
    assert found.error == "AnswerError: <no text, its __str__ raised KeyError>"
    assert found.where.startswith("users_sums.py:")
    assert "    raise AnswerError\nE   AnswerError: <no text, " in found.report


def test_the_methods_of_a_class_that_cannot_be_defined_are_no_values(tmp_path: Path) -> None:
    source = "class Sums:\n    def task(self, rng): ...\n    def prompt(self, task) -> Nope: ...\n"
    with pytest.raises(NameError) as caught:
        exec(compile(source, str(tmp_path / "sums.py"), "exec"), {})
    report = failure_of(caught.value, UserFiles(tmp_path)).report
    assert report.endswith("E   NameError: name 'Nope' is not defined")


def test_the_innermost_frames_are_enough(code: Any, tmp_path: Path) -> None:
    assert failure_of(raised(code.Deep()), UserFiles(tmp_path)).report.count(": in graded\n") == FRAMES


class AboutError(Exception):
    def __init__(self, function: Any) -> None:
        self.users_function = function


def test_a_function_that_has_returned_is_shown_in_place_of_frames(code: Any, tmp_path: Path) -> None:
    line = CODE.splitlines().index("    def graded(self, text):") + 1
    wrapped = wraps(code.Sums.graded)(lambda *_: 0.0)
    partly: Any = partial(wrapped, text="1")  # type: ignore[call-arg]
    for function in (code.Sums.graded, code.Sums().graded, wrapped, partly):
        found = failure_of(AboutError(function), UserFiles(tmp_path))
        assert found.where == f"users_sums.py:{line}"
        assert found.report.startswith(f"users_sums.py:{line}: in graded\n    def graded(self, text):\nE   ")
    assert failure_of(AboutError(code.Called()), UserFiles(tmp_path)).report.startswith("users_sums.py:")
    for other in (len, play, None, 5):
        assert failure_of(AboutError(other), UserFiles(tmp_path)).where == ""


def test_a_recursion_is_looked_at_from_both_ends(code: Any, tmp_path: Path) -> None:
    """The frames that have the task are outermost, those that raised innermost."""
    seen: list[str] = []

    class Counting(UserFiles):
        def has(self, path: str) -> bool:
            seen.append(path)
            return super().has(path)

    report = failure_of(raised(code.Recursive()), Counting(tmp_path)).report
    assert report.count(": in graded\n") == FRAMES
    assert "task        (3, 4)" in report
    assert len(seen) <= 4 * 2 * ENDS


def test_a_method_beside_the_line_of_a_class_is_no_task(tmp_path: Path) -> None:
    file = tmp_path / "misspelt.py"
    file.write_text(
        "class E:\n    def task(self, rng): ...\n    def prompt(self, task) -> Nope: ...\n\n\nE().prompt\n"
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which error depends on Python's version
        exec(compile(f"{file.read_text()}\nE.Nope", str(file), "exec"), {})
    report = failure_of(caught.value, UserFiles(tmp_path)).report
    assert report.startswith("misspelt.py:")
    assert "\ntask " not in report


def test_a_file_that_is_no_python_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("def f(:\n", str(tmp_path / "broken.py"), "exec")
    assert failure_of(caught.value, UserFiles(tmp_path)).where == "broken.py:1"


def test_a_secret_is_in_no_report(code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_hidden", {})
    hide("(3, 4)", "env:SECRET")
    assert "task        env:SECRET" in failure_of(raised(code.Sums()), UserFiles(tmp_path)).report


def test_an_instruction_without_a_line_is_at_the_first_line_of_its_function(
    code: Any, tmp_path: Path
) -> None:
    code.now.__code__ = code.now.__code__.replace(co_linetable=b"")
    frames = code.now(frames_of)
    assert frames[-1].f_lineno is None
    first = code.now.__code__.co_firstlineno
    assert failure_at(frames, UserFiles(tmp_path), "hangs").where == f"users_sums.py:{first}"


def test_running_and_waiting_code_has_a_place_too(code: Any, tmp_path: Path) -> None:
    running = failure_at(code.now(frames_of), UserFiles(tmp_path), "took longer than 5 s")
    assert running.where.startswith("users_sums.py:")
    assert "return frames_of(sys._getframe())" in running.report

    async def waiting() -> None:
        task = asyncio.create_task(code.waits())
        await asyncio.sleep(0)
        found = failure_at(waiting_frames(task), UserFiles(tmp_path), "waits")
        assert "await asyncio.Event().wait()" in found.report
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(waiting())


def test_an_error_is_one_short_line() -> None:
    assert one_line(ValueError("a\n b" + "c" * 10_000)) == ("ValueError: a b" + "c" * 10_000)[:ERROR_CHARS]
    assert one_line(ExceptionGroup("g", [KeyError("k")])) == "KeyError: 'k'"
