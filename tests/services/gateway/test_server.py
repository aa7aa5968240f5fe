import socket

import pytest

from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.services.gateway.server import bind


def test_a_port_that_somebody_has_is_refused() -> None:
    with bind(GatewayConfig(port=0), None) as one:
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(AddressInUseError, match=str(port)):
            bind(GatewayConfig(port=port), None)


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
