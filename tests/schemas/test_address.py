import pytest

from rolloutmq.schemas.address import is_loopback, problem_of_host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_only_this_host_reaches_loopback(host: str) -> None:
    assert is_loopback(host)
    assert not problem_of_host("gateway", host, insecure=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.7", "192.0.2.7", "gpu-7", "localhost.example.org"]
)
def test_any_other_address_must_be_allowed(host: str) -> None:
    assert not is_loopback(host)
    assert "allow it with gateway.insecure = true" in problem_of_host("gateway", host, insecure=False)
    assert not problem_of_host("gateway", host, insecure=True)
