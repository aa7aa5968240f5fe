import contextlib
import errno
import http.client
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.services.gateway.atropos.bodies import group, join, post, start
from tests.services.gateway.atropos.servers import LIMIT_S, Api, our_server, part, wait_for

from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.gateway import server
from rolloutmq.services.gateway.server import bind, port_before
from rolloutmq.services.inference.server import port_before as port_of_engine

QUEUED = 10
FEW = 256
"""Usual descriptors of a process are 1,024; a lower limit needs fewer connections."""


def test_a_port_that_somebody_has_is_refused() -> None:
    with bind(GatewayConfig(port=0), None) as one:
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(AddressInUseError, match=str(port)):
            bind(GatewayConfig(port=port), None)


@pytest.mark.parametrize("before", [None, 8001])
def test_an_address_that_cannot_be_bound_is_not_said_to_be_in_use(before: int | None) -> None:
    config = GatewayConfig(host="192.0.2.1", port=0, insecure=True)  # of no machine: RFC 5737
    with pytest.raises(ConfigError, match=r"^gateway\.host: cannot bind 192\.0\.2\.1:0: .*assign.*; choose"):
        bind(config, before)


def test_a_port_of_another_user_is_not_said_to_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(host: str, port: int) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied", f"{host}:{port}")

    monkeypatch.setattr(server, "bound_socket", refusing)
    with pytest.raises(ConfigError, match=r"^gateway\.host: cannot bind 127\.0\.0\.1:80: Permission denied;"):
        bind(GatewayConfig(port=80), None)


def test_where_any_port_will_do_it_is_that_of_before_if_it_is_free() -> None:
    with bind(GatewayConfig(port=0), None) as one:
        before = one.getsockname()[1]
        one.listen()
        with bind(GatewayConfig(port=0), before) as other:
            assert other.getsockname()[1] != before
    with bind(GatewayConfig(port=0), before) as again:
        assert again.getsockname()[1] == before


def test_both_families_bind() -> None:
    with bind(GatewayConfig(host="::1", port=0), None) as six:
        assert six.family is socket.AF_INET6


def test_silent_connections_beyond_the_usual_limit_keep_nobody_out(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
        try:
            url, launcher = stack.enter_context(our_server(tmp_path / "run"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        api, limits = Api("ours", url), part(launcher.pid, "serve-gateway").rlimit(resource.RLIMIT_NOFILE)
        assert limits == (hard, hard)
        address = url.removeprefix("http://").split(":")
        for _ in range(2 * FEW):
            stack.enter_context(socket.create_connection((address[0], int(address[1])), LIMIT_S))
        start(api, batch_size=100)
        post(api, group(1, env_id=join(api)["env_id"]))
        assert api.get("/status").json["queue_size"] == 1


def test_a_queue_is_as_long_as_it_was_whatever_is_killed(tmp_path: Path) -> None:
    """An environment that hears of an empty queue starts all its workers."""
    told: list[dict[str, Any]] = []
    with our_server(tmp_path / "run") as (url, launcher):
        api = Api("ours", url)
        start(api, batch_size=100)
        env_id = join(api)["env_id"]
        post(api, *(group(number, env_id=env_id) for number in range(QUEUED)))
        told.append(api.get("/status-env", env_id=env_id).json)
        stop = threading.Event()
        asking = threading.Thread(target=keep_asking, args=(api, env_id, told, stop))
        asking.start()
        try:
            for names in (["serve-gateway"], ["broker", "serve-gateway"]):
                for name in names:
                    part(launcher.pid, name).kill()
                answers = len(told)
                wait_for(lambda many=answers + 3: len(told) >= many, launcher, "an answer")
        finally:
            stop.set()
            asking.join(LIMIT_S)
    assert len(told) > 4
    assert {(one["queue_size"], one["self_queue_size"]) for one in told} == {(QUEUED, QUEUED)}


def keep_asking(api: Api, env_id: int, told: list[dict[str, Any]], stop: threading.Event) -> None:
    """Ask for the status as environments do; a connection that breaks is another attempt."""
    while not stop.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = api.get("/status-env", env_id=env_id)
            assert answer.status == 200, answer.body
            told.append(answer.json)


@pytest.mark.parametrize(
    "text", [b'{"url": 1}', b"\xff", b'{"url": "http://h:x", "pid": 1}', b'{"url": "", "pid": 1}']
)
def test_an_address_that_cannot_be_read_keeps_no_gateway_from_starting(run_dir: Path, text: bytes) -> None:
    layout = RunLayout(run_dir)
    for path in (layout.gateway, layout.inference):
        path.write_bytes(text)
    assert port_before(layout) is None
    assert port_of_engine(layout.inference) is None
