"""`rolloutmq dead`: what died is listed and shown, and a living broker takes it back."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from tests.services.broker.journal.handmade import Handmade, began, flip
from tests.services.broker.journal.other_versions import as_version, listing

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.commands.records import dead
from rolloutmq.schemas.errors import BrokerUnavailableError, RecordVersionError
from rolloutmq.schemas.files import Endpoints
from rolloutmq.schemas.wire.control import Requeue, Requeued
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.schemas.wire.requests import Request
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.format.events import Dropped


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    """A run with three dead groups: one whole, one without contents, one whose letter is damaged."""
    made = Handmade(run_dir)
    events = [Dropped(order, "dead", "deliveries") for order in (1, 2, 3)]
    made.log(began(), [made.accept(order) for order in (1, 2, 3)], events)
    store = DeadLetterStore(made.layout.dead, 1 << 20, sync=False)
    for order in (1, 2, 3):
        group = made.groups[order]
        frames = None if order == 2 else group.body.frames
        store.bury(group, frames, f"lost with {order} leases", 2100.0)
    flip(sorted(made.layout.dead.iterdir())[2], 30)
    return made


@contextmanager
def broker(made: Handmade, answer: Callable[[Request], Reply]) -> Iterator[None]:
    """Answer one request, as a broker of the run."""
    address = f"ipc://{made.layout.root}/serve"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    write_json(
        made.layout.endpoints, Endpoints(ingest="", serve=address, events="", publish="", pid=1, epoch=1)
    )

    def serve() -> None:
        if socket.poll(10_000):
            *route, request = socket.recv_multipart()
            socket.send_multipart([*route, codec.encode(answer(codec.decode_request(request)))])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        socket.close(linger=0)
        context.term()


def test_the_dead_are_listed(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead.show_list(made.layout.root, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    nbytes = made.groups[1].header.nbytes
    assert lines[0].endswith(f"g1  sort3  lost with 1 leases  ({nbytes} bytes)")
    assert lines[1].endswith("g2  sort3  lost with 2 leases  (contents not kept)")
    assert lines[2] == "000000000003.rmq: damaged, the beginning of the file is damaged"


def test_the_dead_are_listed_for_a_program(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead.show_list(made.layout.root, as_json=True) == 0
    first, second, third = json.loads(capsys.readouterr().out)
    assert (first["group_id"], first["order"], first["kept"], first["env"]) == ("g1", 1, True, "sort3")
    assert (first["reason"], first["at"], second["kept"]) == ("lost with 1 leases", 2100.0, False)
    assert third == {
        "order": 3,
        "file": "000000000003.rmq",
        "damaged": "the beginning of the file is damaged",
    }


def test_nobody_is_dead(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead.show_list(run_dir, as_json=False) == 0
    assert capsys.readouterr().out == "no group is dead\n"
    assert dead.show_list(run_dir, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_one_is_shown_with_what_it_holds(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead.show(made.layout.root, "g1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("group g1, order 1: dead since ")
    assert "  reason      lost with 1 leases" in lines
    assert any("accepted" in line for line in lines)
    assert any("dead" in line and "reason=deliveries" in line for line in lines)
    columns = [line.split() for line in lines[lines.index("columns") + 1 :]]
    assert columns[0] == ["tokens", "i32", "[2][2..3]", "1", "2", "3", "4", "5"]
    assert ["scores", "f64", "[2]", "0.25", "1.0"] in columns
    assert columns[-1][:2] == ["messages", "opaque"]


def test_what_was_not_kept_or_is_damaged_is_said(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead.show(made.layout.root, "g2") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  contents not kept"
    flip(sorted(made.layout.dead.iterdir())[0], -20)
    assert dead.show(made.layout.root, "g1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  contents damaged"
    assert dead.show(made.layout.root, "g3") == 1
    assert "g3: no such dead group in" in capsys.readouterr().err


def test_the_broker_is_asked_to_take_them_back(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        return Requeued(requeued=("g1",), refused={"g2": "its contents were not kept"})

    with broker(made, answer):
        assert dead.requeue(made.layout.root, ["g1", "g2"], every=False) == 1
    assert asked == [Requeue(groups=("g1", "g2"))]
    assert capsys.readouterr().out.splitlines() == ["requeued g1", "refused  g2: its contents were not kept"]


@pytest.mark.parametrize(
    ("names", "told"), [(("g1", "g3"), "requeued g1\nrequeued g3\n"), ((), "no group is dead\n")]
)
def test_all_of_them_may_be_meant(
    made: Handmade, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], told: str
) -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        return Requeued(requeued=names)

    with broker(made, answer):
        assert dead.requeue(made.layout.root, [], every=True) == 0
    assert asked == [Requeue()]
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(("names", "every"), [([], False), (["g1"], True)])
def test_one_has_to_say_which(made: Handmade, names: list[str], every: bool) -> None:
    assert dead.requeue(made.layout.root, names, every=every) == 2


def test_without_a_broker_nobody_comes_back(made: Handmade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead, "ANSWER_S", 0.05)
    with pytest.raises(BrokerUnavailableError):
        dead.requeue(made.layout.root, ["g1"], every=False)


def test_letters_of_another_version_are_an_error_and_no_damage(made: Handmade) -> None:
    as_version(sorted(made.layout.dead.iterdir())[0], 2)
    before = listing(made.layout.root)
    with pytest.raises(RecordVersionError, match="got version 2"):
        dead.show_list(made.layout.root, as_json=False)
    with pytest.raises(RecordVersionError, match="got version 2"):
        dead.show(made.layout.root, "g1")
    assert listing(made.layout.root) == before
