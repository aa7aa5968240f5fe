"""Names belong to the key that registered them first."""

import pytest

from rolloutmq.schemas.wire.control import GetStatus, WorkerBeat, WorkerState
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.requests import ConsumerBeat, RegisterConsumer, RegisterProducer, Sync
from rolloutmq.services.broker.requests import ownership
from rolloutmq.services.broker.requests.ownership import Ownership


def register(name: str) -> RegisterProducer:
    return RegisterProducer(producer=name, env="e")


def code(names: Ownership, key: str, request: object) -> ErrorCode | None:
    refused = names.refusal(key, request)  # type: ignore[arg-type]
    return refused.code if refused is not None else None


def test_a_name_is_of_the_key_that_came_first() -> None:
    names = Ownership()
    assert names.refusal("w-7", register("p")) is None
    assert names.refusal("w-7", register("p")) is None
    assert names.refusal("w-7", Sync(producer="p", session=1)) is None
    refused = names.refusal("w-8", register("p"))
    assert refused is not None
    assert (refused.code, refused.detail) == (
        ErrorCode.FORBIDDEN,
        "producer: belongs to another key (got p with key w-8); use another name, or that key",
    )
    assert code(names, "w-8", Sync(producer="p", session=1)) is ErrorCode.FORBIDDEN
    assert names.owns("w-7", "p")
    assert not names.owns("w-8", "p")
    assert not names.owns("w-7", "q")


def test_producers_and_consumers_have_names_of_their_own() -> None:
    names = Ownership()
    assert names.refusal("w", register("x")) is None
    assert names.refusal("t", RegisterConsumer(consumer="x")) is None
    assert code(names, "w", ConsumerBeat(consumer="x")) is ErrorCode.FORBIDDEN
    assert names.refusal("t", GetStatus()) is None


def test_a_worker_is_its_producer() -> None:
    names = Ownership()
    beat = WorkerBeat(worker="w-1", env="e", state=WorkerState.READY)
    assert names.refusal("k", beat) is None
    assert code(names, "other", register("w-1")) is ErrorCode.FORBIDDEN


def test_what_is_not_registered_is_unknown_so_that_its_client_registers() -> None:
    assert code(Ownership(), "k", Sync(producer="p", session=7)) is ErrorCode.UNKNOWN


def test_names_of_this_host_are_its_own() -> None:
    names = Ownership()
    names.take(register("p"))
    assert code(names, "k", register("p")) is ErrorCode.FORBIDDEN
    assert code(names, "k", Sync(producer="p", session=1)) is ErrorCode.FORBIDDEN
    assert names.refusal("k", register("q")) is None
    names.take(register("q"))
    assert not names.owns("k", "q")
    assert code(names, "k", register("q")) is ErrorCode.FORBIDDEN


def test_a_revoked_key_has_no_names() -> None:
    names = Ownership()
    names.refusal("old", register("p"))
    names.release("old")
    assert names.refusal("new", register("p")) is None
    assert names.changes == {"producer:p": "new"}


def test_a_restarted_broker_knows_the_owners() -> None:
    names = Ownership()
    names.refusal("k", register("p"))
    again = Ownership(names.changes)
    assert again.changes == {}
    assert again.owns("k", "p")
    assert code(again, "other", register("p")) is ErrorCode.FORBIDDEN


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "NAMES_LIMIT", 3)
    monkeypatch.setattr(ownership, "LOCAL_LIMIT", 3)
    names = Ownership()
    for number in range(3):
        assert names.refusal("k", register(f"p-{number}")) is None
    refused = names.refusal("k", register("p-3"))
    assert refused is not None
    assert "key k has 3 names, the limit (got p-3)" in refused.detail
    assert names.refusal("other", register("p-3")) is None
    for number in range(5):
        names.take(register(f"l-{number}"))
    assert names.refusal("other", register("l-0")) is None  # forgotten
    assert code(names, "other", register("l-4")) is ErrorCode.FORBIDDEN
