"""The policy client and engines with a certificate of the run's own authority."""

import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.services.http_server.authority import Pair, pair

from rolloutmq.schemas.config.run import RunConfig, RunSection
from rolloutmq.schemas.errors import PolicyUnavailableError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.http_server.access import HttpAccess
from rolloutmq.services.http_server.listening import listening
from rolloutmq.services.http_server.tls import ServerTls, client_tls
from rolloutmq.services.http_server.tokens import Holder, TokenStore
from rolloutmq.services.inference.server import application, replied
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines

TOKEN = "0123456789abcdef"


@asynccontextmanager
async def served(made: Pair, host: str = "127.0.0.1") -> AsyncIterator[Engines]:
    async def models(_request: web.Request) -> web.Response:
        return replied(b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}')

    async def tokens(_request: web.Request) -> web.Response:
        return replied(b'{"tokens": [4, 5]}')

    access = HttpAccess(tokens=TokenStore({TOKEN: Holder("worker-7", Role.WORKER)}))
    app = application({"/v1/models": ("GET", models), "/tokenize": ("POST", tokens)}, access)
    async with listening(app, host, 0, None, ServerTls(made.cert, made.key)) as port:
        address = InferenceAddress(url=f"https://{host}:{port}", pid=0)
        yield Engines(lambda: [address], random.Random(0))


def trusted(made: Pair) -> ssl.SSLContext | None:
    return client_tls(RunConfig(run=RunSection(tls_ca=made.ca)))


async def test_it_trusts_the_authority_of_the_run(tmp_path: Path) -> None:
    made = pair(tmp_path / "a")
    async with (
        served(made) as engines,
        OpenAIPolicy.opened(engines, token=lambda _: TOKEN, tls=trusted(made)) as policy,
    ):
        assert await policy.tokenize("473") == [4, 5]
        async with policy.endpoint() as endpoint, aiohttp.ClientSession() as own:
            url = endpoint.base_url.replace("/v1", "/tokenize")
            assert endpoint.tls is not None
            async with own.post(url, data=b"{}", ssl=endpoint.tls) as answer:
                assert answer.status == 200


async def test_it_sends_nothing_to_a_server_of_another_authority_or_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, other = pair(tmp_path / "a"), pair(tmp_path / "b")
    for trust, host, why in (
        (None, "127.0.0.1", "unable to get local issuer certificate"),
        (trusted(other), "127.0.0.1", "unable to get local issuer certificate"),
        (trusted(made), "127.0.0.2", "IP address mismatch"),
    ):
        async with (
            served(made, host) as engines,
            OpenAIPolicy.opened(engines, token=lambda _: TOKEN, tls=trust, patience_s=1.0) as policy,
        ):
            caplog.clear()
            with pytest.raises(PolicyUnavailableError):
                await policy.tokenize("473")
            assert why in caplog.text
