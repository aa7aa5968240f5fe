"""The page of a run with a certificate: its link and cookie are for TLS alone."""

import http.client
import json
import ssl
from pathlib import Path

import pytest
from tests.services.dashboard.serving import serving_tls
from tests.services.http_server.authority import Pair, pair

from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.dashboard.server import page_tls


@pytest.fixture
def made(ended: RunLayout, tmp_path: Path) -> Pair:
    """The certificate of the run that ended."""
    files = pair(tmp_path / "keys")
    config, _ = load_run(ended.root)
    run = config.run.model_copy(update={"tls_cert": files.cert, "tls_key": files.key})
    write_json(ended.config, config.model_copy(update={"run": run}))
    return files


def test_the_page_speaks_tls_and_its_cookie_is_secure(ended: RunLayout, made: Pair) -> None:
    with serving_tls(ended.root) as (port, token):
        trust = ssl.create_default_context(cafile=made.ca)
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trust)
        headers = {"Origin": f"https://127.0.0.1:{port}", "Content-Type": "application/json"}
        connection.request("POST", "/api/session", json.dumps({"token": token}), headers)
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 204
        cookie = reply.headers["Set-Cookie"]
        assert "secure" in cookie.lower()
        connection.request("GET", "/api/state", headers={"Cookie": cookie.partition(";")[0]})
        assert connection.getresponse().status == 200
        connection.close()
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        plain.request("GET", "/")
        assert plain.getresponse().status == 400
        plain.close()


def test_a_page_on_loopback_goes_on_without_its_certificate(
    ended: RunLayout, made: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    made.cert.unlink()
    assert page_tls(ended.root, "127.0.0.1") is None
    assert "page without TLS error=run.tls_cert: " in caplog.text
    with pytest.raises(ConfigError, match=r"^run\.tls_cert: "):
        page_tls(ended.root, "0.0.0.0")
