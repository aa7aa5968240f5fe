"""`rolloutmq try`: rollouts in this process, with the terminal as their own, and nothing left behind."""

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tests.launch.preflight.support import CLASSES, config

from rolloutmq.launch.endings import UserCodeError
from rolloutmq.launch.preflight import try_rollouts as trying
from rolloutmq.launch.preflight.try_rollouts import TryOptions, payload_of, try_rollouts
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.inference.tiny.local import serving

LIMIT_S: Final = 120.0
KINDS: Final = """

import json
import urllib.request

from rolloutmq import Trajectory


class Multi(Good):
    async def rollout(self, policy, size, rng):
        found = []
        for _ in range(size):
            (first,) = await policy.complete("1=", max_tokens=3)
            turns = Trajectory.of(first)
            (second,) = await policy.complete([*turns.token_ids, 3, 4], max_tokens=3)
            found.append(turns.then(second).scored(rng.random()))
        return found


class OwnClient(Good):
    async def rollout(self, policy, size, rng):
        async with policy.endpoint() as endpoint:
            asked = dict(endpoint.request)
            body = {**asked.pop("extra_body"), **asked, "messages": [{"role": "user", "content": "1="}], "n": size}
            request = urllib.request.Request(
                endpoint.base_url + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
        return [Trajectory.of(one, 1.0) for one in endpoint.completions(answer)]


class Rated(Unscored):
    rewards = Ensemble({"a": lambda task, answer, **_: 0.5})


class Exiting(Good):
    async def score(self, task, completion):
        await asyncio.create_task(self.leave())

    async def leave(self):
        raise SystemExit(0)
"""


@pytest.fixture(autouse=True)
def kinds(base_dir: Path) -> None:
    (base_dir / "tried.py").write_text(CLASSES + KINDS)


def tried(config: RunConfig, capsys: pytest.CaptureFixture[str], code: int = 0, **options: Any) -> str:
    assert try_rollouts(config, "", TryOptions(**options)) == code
    return capsys.readouterr().out


def test_tokens_mask_score_and_time_are_printed_and_nothing_stays(
    base_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(here)
    level, handler = logging.root.level, signal.getsignal(signal.SIGINT)
    head, first, given, *rest = tried(config(base_dir, "Good"), capsys, size=2, count=2).splitlines()
    assert re.fullmatch(r"rollout 1 of 2: 2 sequences, \d+\.\d\d s", head)
    assert re.fullmatch(r"  1  score 0, \d+ tokens, \d+ sampled, ends by (stop|length)", first)
    assert re.fullmatch(r"     mask 0  '<bos>\d+=\d+'  \[1( \d+)+\]", given)
    assert re.fullmatch(r"     mask 1  '.*'  \[\d+( \d+)*( … \d+ more)?\]", rest[0])
    assert re.fullmatch(r"2 rollouts of e: 4 sequences, \d+\.\d s, scores 0 to 0, mean 0\.000", rest[-2])
    assert rest[-1] == "all scores of each rollout are equal: a trainer learns nothing from them"
    assert [*temporary.iterdir(), *here.iterdir()] == []
    assert (logging.root.level, signal.getsignal(signal.SIGINT)) == (level, handler)


def test_json_has_a_line_for_each_rollout_and_a_seed_repeats_it(
    base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(seed: int) -> list[dict[str, Any]]:
        made = config(base_dir, "Printing", run={"seed": seed})
        code = try_rollouts(made, "e", TryOptions(count=2, size=3, as_json=True))
        assert code == 0
        out = capsys.readouterr()
        assert "scored" in out.err
        return [json.loads(line) for line in out.out.splitlines()]

    first, again, other = lines(1), lines(1), lines(2)
    assert [(one["env"], one["rollout"], len(one["sequences"])) for one in first] == [
        ("e", 1, 3),
        ("e", 2, 3),
    ]
    assert [one["sequences"] for one in first] == [one["sequences"] for one in again]
    assert [one["sequences"] for one in first] != [one["sequences"] for one in other]
    for sequence in first[0]["sequences"]:
        count = len(sequence["tokens"])
        assert len(sequence["mask"]) == len(sequence["logprobs"]) == count
        assert {"score", "finish_reason", "text"} <= sequence.keys()
        assert [value == 0 for value in sequence["logprobs"]] == [mask == 0 for mask in sequence["mask"]]


@pytest.mark.parametrize(
    ("kind", "environment", "sections", "options", "words"),
    [
        ("Multi", {}, {}, {}, ["mask 1", "[3 4]", "score 0."]),
        ("OwnClient", {}, {}, {}, ["mask 0  '<bos>1='", "score 1,"]),
        ("Rated", {}, {}, {}, ["score 0.5,"]),
        ("Rows", {"task_count": 3}, {"curriculum": {"e": {}}}, {}, ["score 0,"]),
        ("Good", {"tasks": "submitted"}, {}, {"payloads": [[7, 8]]}, ["'<bos>7=8'"]),
        ("Good", {"group_deadline_s": 60.0}, {}, {}, ["score 0,"]),
    ],
)
def test_every_kind_of_environment_is_rolled_out(
    kind: str,
    environment: dict[str, Any],
    sections: dict[str, Any],
    options: dict[str, Any],
    words: Sequence[str],
    base_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = tried(config(base_dir, kind, environment, **sections), capsys, size=2, **options)
    assert all(word in found for word in words), found


def test_a_server_elsewhere_is_asked_and_names_its_tokens(
    base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(validate({}), 5) as server:
        external = {"kind": "external", "url": f"{server.url}/v1"}
        found = tried(
            config(base_dir, "Good", inference=external, trainer={"enabled": False}), capsys, size=1
        )
    given, sampled = found.splitlines()[2:4]
    assert re.fullmatch(r"     mask 0  \[1( \d+)+\]", given), "it names sampled tokens alone"
    assert re.fullmatch(r"     mask 1  '.*'  \[.*\]", sampled)


def test_a_server_that_is_away_ends_the_rollouts(
    base_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trying, "PATIENCE_S", 0.2)
    external = {"kind": "external", "url": "http://127.0.0.1:9/v1"}
    made = config(base_dir, "Good", inference=external, trainer={"enabled": False})
    first, *_, last = tried(made, capsys, code=1, count=50).splitlines()
    assert "policy: no answer from http://127.0.0.1:9 within 0.2 s" in first
    assert last.startswith("1 rollouts of e: 0 sequences, ")


def test_an_exception_is_shown_once_with_its_frame_task_and_completion(
    base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tried(config(base_dir, "Raises"), capsys, code=1, size=2, count=2).splitlines()
    head = r"rollout {} of 2: FAILED after \d+\.\d\d s: ZeroDivisionError: division by zero \(tried\.py:\d+\)"
    assert re.fullmatch(head.format(1), lines[0])
    assert re.fullmatch(r"    tried\.py:\d+: in score", lines[2])
    assert lines[4] == "    E   ZeroDivisionError: division by zero"
    assert any(line.startswith("    completion  ") for line in lines)
    assert re.fullmatch(head.format(2) + ", as rollout 1", lines[-2])
    assert lines[-1].endswith(", 2 FAILED")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Unentered", "OSError: no sandbox"),
        ("Exiting", "SystemExit"),
        ("Promptless", "`Promptless.prompt` must return text, token ids or messages (got None)"),
    ],
)
def test_code_around_the_rollouts_fails_as_well(
    kind: str, words: str, base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in tried(config(base_dir, kind), capsys, code=1, size=1)
    (line,) = (
        json.loads(line)
        for line in tried(config(base_dir, kind), capsys, code=1, size=1, as_json=True).splitlines()
    )
    assert words in line["error"]


def test_a_rater_that_never_rates_is_told_at_the_end(
    base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for as_json in (False, True):
        made = config(base_dir, "Paired", {"options": {"kind": "keyless"}})
        assert try_rollouts(made, "", TryOptions(size=2, count=2, as_json=as_json)) == 0
        said = capsys.readouterr().err
        assert re.search(
            r"environment\.e: rater b rated none of 4 answers: ValueError: no key \(tried\.py:\d+\); only other",
            said,
        )
        assert re.search(r'tried\.py:\d+: in keyless\n +raise ValueError\("no key"\)', said)


def test_what_cannot_be_tried_is_refused_by_name(base_dir: Path) -> None:
    def refused(made: RunConfig, env: str = "") -> str:
        with pytest.raises(ConfigError) as caught:
            try_rollouts(made, env, TryOptions())
        return str(caught.value)

    assert refused(validate({})).startswith("environment: there is none; add")
    assert refused(config(base_dir, "Good"), "f") == "environment.f: no such section; name one of e"
    two = validate(
        {"environment": {name: {"entry": "tried.py:Good"} for name in "ab"}, "base_dir": str(base_dir)}
    )
    assert refused(two) == "ENV: required, because there are several environments; name one of a, b"
    program = {"environment": {"p": {"command": ["run"]}}, "gateway": {"enabled": True}}
    assert refused(validate(program)).startswith(
        "environment.p.command: is a program that rolls out by itself"
    )
    assert refused(config(base_dir, "Godo")).endswith("did you mean `Good`?")
    with pytest.raises(
        UserCodeError, match=r"(?s)Broken\(\) raised ValueError: no key \(tried.py:.*raise ValueError"
    ):
        try_rollouts(config(base_dir, "Broken"), "", TryOptions())


def test_a_submitted_task_is_json() -> None:
    assert payload_of('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ConfigError, match=r"^--task: must be JSON \(got 'a'\)"):
        payload_of("a")


def command(base_dir: Path, kind: str, *options: str) -> list[str]:
    file = base_dir / "run.toml"
    file.write_text(f'[environment.e]\nentry = "tried.py:{kind}"\n')
    return [sys.executable, "-m", "rolloutmq.launch.cli", "try", str(file), *options]


def test_a_breakpoint_has_the_terminal(base_dir: Path) -> None:
    """`breakpoint()` asks on the terminal, shows the locals, and the rollout goes on or ends."""
    argv = command(base_dir, "Debugged", "--size", "1")
    code, said = typed(argv, ["p 'the task is', task", "c"])
    assert re.search(r"\('the task is', \(\d+, \d+\)\)", said)
    assert "rollout 1 of 1: 1 sequences" in said
    assert code == 0
    code, said = typed(argv, ["q"])
    assert "ended in the debugger" in said
    assert code == 130


def typed(argv: list[str], lines: list[str]) -> tuple[int, str]:
    """Run a command on a terminal, type a line at each prompt of the debugger, and return its code and output."""
    terminal, theirs = pty.openpty()
    with subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        timer = _killing(process)
        said, left = b"", list(lines)
        try:
            while True:
                try:
                    found = os.read(terminal, 1 << 12)
                except OSError:  # the command has ended
                    break
                said += found
                if left and said.count(b"(Pdb) ") > len(lines) - len(left):
                    os.write(terminal, left.pop(0).encode() + b"\n")
            return process.wait(timeout=LIMIT_S), said.decode()
        finally:
            timer.cancel()
            os.close(terminal)


@pytest.mark.parametrize("kind", ["Spinning", "Waiting"])
def test_an_interrupt_says_where_the_code_was(kind: str, base_dir: Path) -> None:
    argv = command(base_dir, kind, "--size", "1")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        timer = _killing(process)
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if re.fullmatch(r"rollout 1: \d+ s so far, at tried\.py:\d+\n", line):
                    break
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=LIMIT_S)
        finally:
            timer.cancel()
    assert process.returncode == 130
    assert re.search(
        r"^rollout 1: interrupted \(tried\.py:\d+\)\n\n    tried\.py:\d+: in score\n", told, re.MULTILINE
    )
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("kind", "line", "code", "told"),
    [
        ("ScoreExits", "os._exit(0)", 1, r"^FAILED: os\._exit\(0\) ends the process \(tried\.py:{}\)$"),
        (
            "RaterFaults",
            "ctypes.string_at(0)",
            -signal.SIGSEGV,
            r'^  File "/.*/tried\.py", line {} in faulty$',
        ),
    ],
)
def test_code_that_ends_the_process_is_told(
    kind: str, line: str, code: int, told: str, base_dir: Path
) -> None:
    number = next(at for at, one in enumerate(CLASSES.splitlines(), 1) if one.strip() == line)
    argv = command(base_dir, kind, "--size", "1")
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == code
    assert re.search(told.format(number), ended.stderr, re.MULTILINE), ended.stderr


def _killing(process: "subprocess.Popen[Any]") -> threading.Timer:
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.daemon = True
    timer.start()
    return timer
