import pytest

from rolloutmq.schemas.network.address import (
    host_and_port,
    is_loopback,
    listen_of,
    problem_of_host,
    problem_of_listen,
    problem_of_weights,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_only_this_host_reaches_loopback(host: str) -> None:
    assert is_loopback(host)
    assert not problem_of_host("gateway", host, tokens=False, insecure=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.7", "192.0.2.7", "gpu-7", "localhost.example.org"]
)
def test_any_other_address_must_be_allowed(host: str) -> None:
    assert not is_loopback(host)
    assert "allow it with gateway.insecure = true" in problem_of_host(
        "gateway", host, tokens=False, insecure=False
    )
    assert not problem_of_host("gateway", host, tokens=False, insecure=True)
    assert not problem_of_host("gateway", host, tokens=True, insecure=False)


@pytest.mark.parametrize(
    "listen",
    [
        "7760",
        "0.0.0.0:7760",
        "tcp://0.0.0.0",
        "tcp://*:7760",
        "tcp://::1:7760",
        "tcp://h:65533",
        "ipc://x",
        "tcp://h:x",
    ],
)
def test_what_is_no_address_of_a_listener(listen: str) -> None:
    assert listen_of(listen) is None
    assert f"must be tcp://HOST:PORT, the first of 4 ports (got {listen!r})" in problem_of_listen(
        listen, "keys", insecure=False
    )


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:7760", "tcp://[::1]:0", "tcp://127.0.0.1:65532"])
def test_a_listener_needs_keys_or_must_be_insecure(listen: str) -> None:
    """Also on loopback, which other users of the host reach."""
    refused = problem_of_listen(listen, "", insecure=False)
    assert refused.startswith("listen needs keys, or whoever reaches the address may use the run")
    assert "`rolloutmq keys init keys`" in refused
    assert "broker.insecure = true" in refused
    assert not problem_of_listen(listen, "keys", insecure=False)
    assert not problem_of_listen(listen, "", insecure=True)
    assert "insecure must be false with keys" in problem_of_listen(listen, "keys", insecure=True)


def test_who_reaches_a_listener() -> None:
    for local in ("tcp://127.0.0.1:1", "tcp://[::1]:1"):
        assert (found := listen_of(local)) is not None
        assert found.is_local
    assert (found := listen_of("tcp://0.0.0.0:7760")) is not None
    assert not found.is_local
    assert found.port == 7760


def test_both_parts_of_an_address() -> None:
    assert host_and_port("tcp://[::1]:0") == ("::1", 0)
    assert host_and_port("tcp://gpu-7:7764") == ("gpu-7", 7764)
    for other in (
        "",
        "127.0.0.1:1",
        "tcp://host",
        "tcp://host:x",
        "ipc://a:1",
        "tcp://h:1/x",
        "tcp://[::1:1",
    ):
        assert host_and_port(other) is None


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:0", "tcp://[::]:7764", "tcp://gpu-7:7764"])
def test_weights_for_other_hosts_need_keys_or_must_be_insecure(listen: str) -> None:
    refused = problem_of_weights(listen, "", insecure=False)
    assert refused.startswith("listen needs keys, by which the broker knows who may have the weights")
    assert "`rolloutmq keys init keys`" in refused
    assert "weights.insecure = true" in refused
    assert not problem_of_weights(listen, "keys", insecure=False)
    assert not problem_of_weights(listen, "", insecure=True)
    assert not problem_of_weights("tcp://127.0.0.1:0", "", insecure=False)
