"""Actions are the commands of the same name, and words of a page are never options."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from tests.faults.support.processes import wait_until
from tests.services.dashboard.browser import Answer, Browser
from tests.services.dashboard.test_watch import beat

from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.services.broker.server import Broker
from rolloutmq.services.dashboard.actions import Actions, command_of, words_of


def words(name: str, **body: object) -> list[str]:
    return words_of(name, json.dumps(body).encode())


def test_the_command_line_of_each_action() -> None:
    assert words("drain", worker="w-1") == ["drain", "--", "w-1"]
    assert words("restart", worker="w-1") == ["restart", "--", "w-1"]
    assert words("restart", worker="w-1", now=True) == ["restart", "--now", "--", "w-1"]
    assert words("scale", env="sort3", count=None) == ["scale", "--", "sort3", "auto"]
    assert words("scale", env="sort3", count=4) == ["scale", "--", "sort3", "4"]
    assert words("cordon", gpu="GPU-1", reason="hot") == ["cordon", "--reason=hot", "--", "GPU-1"]
    assert words("uncordon", gpu="GPU-1") == ["uncordon", "--", "GPU-1"]
    assert words("set", values={"a.b": 2, "c.d": "x", "e": True}) == [
        "set",
        "--",
        "a.b=2",
        'c.d="x"',
        "e=true",
    ]
    assert words("requeue", groups=["g1", "g2"]) == ["dead", "requeue", "--", "g1", "g2"]
    assert words("requeue", all=True) == ["dead", "requeue", "--all", "--"]


def test_a_word_of_a_page_is_no_option() -> None:
    told = command_of(Path("/run"), words("drain", worker="--run-dir=/other"))
    assert told[-4:] == ("--run-dir=/run", "--json", "--", "--run-dir=/other")
    assert words("cordon", gpu="-x", reason="--help")[:2] == ["cordon", "--reason=--help"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("drain", b""),
        ("drain", b"{}"),
        ("drain", b'{"worker": ""}'),
        ("drain", b'{"worker": "' + b"x" * 600 + b'"}'),
        ("drain", b'{"worker": "\\u0000"}'),
        ("drain", b'{"worker": "a", "other": 1}'),
        ("scale", b'{"env": "a", "count": -1}'),
        ("scale", b'{"env": "a", "count": 1.5}'),
        ("scale", b'{"env": "a"}'),
        ("set", b'{"values": {}}'),
        ("set", b'{"values": {"a": null}}'),
        ("set", b'{"values": {"a": [1]}}'),
        ("requeue", b'{"groups": [' + b",".join([b'"g"'] * 101) + b"]}"),
        ("cordon", b"\xff"),
        ("cordon", b"[" * 10_000),
    ],
)
def test_a_wrong_body_is_an_error(name: str, body: bytes) -> None:
    with pytest.raises(UsageError, match=name):
        words_of(name, body)


def status(broker: Broker) -> StatusReply:
    with BlockingClient(broker.endpoints.serve) as client:
        reply = client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply


def test_an_action_reaches_the_broker_and_an_error_comes_back(broker: Broker, at_living: Browser) -> None:
    told = at_living.post("/api/actions/set", {"values": {"broker.lease_s": 60}}).json
    assert told == {"ok": True, "code": 0, "text": ["broker.lease_s = 60.0"]}
    assert [(one.key, one.now) for one in status(broker).changed] == [("broker.lease_s", 60.0)]
    told = at_living.post("/api/actions/set", {"values": {"broker.nothing": 1}}).json
    assert (told["ok"], told["code"]) == (False, 2)
    assert "broker.nothing: cannot change during a run" in told["text"][-1]


def test_a_worker_is_drained_and_an_unknown_one_is_told(broker: Broker, at_living: Browser) -> None:
    beat(broker, "sort3-0")
    assert at_living.post("/api/actions/drain", {"worker": "sort3-0"}).json["text"] == ["draining sort3-0"]
    assert [one.draining for one in status(broker).pressure.workers] == [True]
    for unknown, why in (("nobody-0", "no such worker"), ("--help", "malformed")):
        told = at_living.post("/api/actions/drain", {"worker": unknown}).json
        assert told["code"] == 1
        assert why in told["text"][-1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let every command create `started` beside the returned file, and wait for that file."""
    go = tmp_path / "go"
    script = (
        f"import pathlib, time\ngo = pathlib.Path({str(go)!r})\ngo.with_name('started').touch()\n"
        "while not go.exists(): time.sleep(0.01)\nprint('{}')"
    )
    monkeypatch.setattr(Actions.__init__, "__defaults__", (lambda *_: (sys.executable, "-c", script), 60.0))
    return go


@contextmanager
def posted(browser: Browser, answers: list[Answer]) -> Iterator[None]:
    thread = Thread(target=lambda: answers.append(browser.post("/api/actions/requeue", {"all": True})))
    thread.start()
    try:
        yield
    finally:
        thread.join(60)


def test_one_action_at_a_time(slow: Path, at_living: Browser) -> None:
    answers: list[Answer] = []
    with posted(at_living, answers):
        try:
            wait_until(slow.with_name("started").exists, "the first command to start")
            assert at_living.post("/api/actions/drain", {"worker": ""}).status == 400
            assert at_living.post("/api/actions/nothing", {}).status == 404
            assert at_living.post("/api/actions/requeue", {"all": True}).status == 429
        finally:
            slow.touch()
    assert [answer.status for answer in answers] == [200]


async def test_a_command_that_hangs_is_killed() -> None:
    actions = Actions(Path("/"), lambda *_: (sys.executable, "-c", "import time; time.sleep(600)"), 0.2)
    with pytest.raises(TimeoutError):
        await actions.carry_out([])
    assert not actions.is_busy


async def test_the_output_of_a_command_is_bounded() -> None:
    noise = (
        "import sys\nfor _ in range(50000): print('x' * 50); print('y' * 50, file=sys.stderr)\nsys.exit(3)"
    )
    outcome = await Actions(Path("/"), lambda *_: (sys.executable, "-c", noise), 60.0).carry_out([])
    assert outcome.code == 3
    assert len(outcome.lines) <= 200
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "body", "key"),
    [
        ("drain", b'{"worker":"\\ud800"}', "worker"),
        ("set", b'{"values": {"a": "x\\udfff"}}', "values"),
        ("set", b'{"values": {"\\ud800": 1}}', "values"),
        ("requeue", b'{"groups": ["\\ud83d\\ude00", "\\ud83d"]}', "groups"),
        ("drain", b'{"\\ud800": 1}', "\\ud800"),
    ],
)
def test_a_lone_surrogate_is_told_by_its_key(name: str, body: bytes, key: str) -> None:
    with pytest.raises(UsageError) as refusal:
        words_of(name, body)
    assert str(refusal.value).startswith(f"{name}: {key}: must be text that UTF-8 can encode (got ")
