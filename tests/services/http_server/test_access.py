"""Who may send a request to the HTTP servers: the rules, without a server."""

from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.files import write_private
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.run import RunConfig, RunSection
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.http_server.access import (
    HttpAccess,
    access_of,
    authorization,
    is_browser,
    split_token,
    with_token,
)
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.tokens import OWN, Holder, TokenStore

TOKEN = "0123456789abcdef"
GUARDED = HttpAccess(tokens=TokenStore({TOKEN: Holder(OWN, Role.ADMIN)}))
OPEN = HttpAccess(frozenset({"box.lab.example"}), frozenset({"http://page.example"}))


def status(access: HttpAccess, given: str = "", /, *, preflight: bool = False, **headers: Any) -> int:
    """Return the status of a refusal, 200 for none."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    refused = access.refusal(lambda name: named.get(name, ""), given, "/v1/completions", preflight=preflight)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),
        ("localhost:8000", 200),
        ("gateway:8000", 200),
        ("run.localhost", 200),
        ("Box.Lab.example:8000", 200),
        ("box.lab.example.:8000", 200),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example@127.0.0.1", 403),
        ("box.lab.example.evil.example", 403),
    ],
)
def test_a_name_that_a_page_could_point_here_is_refused(host: str, expected: int) -> None:
    assert status(OPEN, host=host) == expected
    assert status(HttpAccess(frozenset({"*"})), host=host) == 200


def test_with_a_token_any_name_is_good_and_no_foreign_page() -> None:
    """Hosts that join use the name by which they reach the run; a page that points its name here has no token."""
    told: dict[str, Any] = {"host": "head.example:8000", "authorization": f"Bearer {TOKEN}"}
    assert status(GUARDED, **told) == 200
    assert status(GUARDED, TOKEN, host="head.example:8000") == 200
    assert status(GUARDED, host="head.example:8000") == 403
    assert status(GUARDED, host="head.example:8000", authorization=f"Bearer {TOKEN}x") == 403
    assert status(GUARDED, preflight=True, **told) == 403
    assert status(GUARDED, **told, origin="http://evil.example") == 403
    assert status(GUARDED, **told, sec_fetch_site="cross-site") == 403


@pytest.mark.parametrize(
    ("origin", "site", "expected"),
    [
        ("", "", 200),
        ("http://127.0.0.1:8000", "same-origin", 200),
        ("http://127.0.0.1:9000", "same-site", 403),
        ("http://page.example", "cross-site", 200),
        ("http://evil.example", "cross-site", 403),
        ("http://evil.example", "", 403),
        ("null", "cross-site", 403),
        ("null", "", 403),
        ("http://[", "", 403),
        ("", "cross-site", 403),
        ("", "same-site", 403),
        ("", "none", 200),
    ],
)
def test_a_page_of_anybody_else_is_refused(origin: str, site: str, expected: int) -> None:
    told: dict[str, Any] = {"host": "127.0.0.1:8000", "origin": origin, "sec_fetch_site": site}
    assert status(OPEN, **told) == expected
    assert status(HttpAccess(origins=frozenset({"*"})), **told) == 200


@pytest.mark.parametrize(
    ("given", "header", "expected"),
    [
        ("", f"Bearer {TOKEN}", 200),
        ("", f"bearer  {TOKEN}", 200),
        (TOKEN, "", 200),
        (TOKEN, "Bearer another", 200),
        ("", "", 401),
        ("", TOKEN, 401),
        ("", f"Basic {TOKEN}", 401),
        ("", f"Bearer {TOKEN}0", 401),
        (TOKEN[:-1], "", 401),
        ("\u00e9", "", 401),
        ("\udcff", "", 401),
        ("", f"Bearer {TOKEN}\udcff", 401),
    ],
)
def test_with_a_token_each_request_needs_it(given: str, header: str, expected: int) -> None:
    assert status(GUARDED, given, authorization=header) == expected
    assert status(GUARDED, given, authorization=header, preflight=True) == 200
    assert status(OPEN, given, authorization=header) == 200


def test_a_refusal_says_what_to_do() -> None:
    refused = GUARDED.refusal(lambda _: "", "", "/health")
    assert refused is not None
    assert refused.headers == {"www-authenticate": "Bearer"}
    assert TOKEN not in refused.reason
    foreign = OPEN.refusal({"host": "evil.example"}.get, "", "/")  # type: ignore[arg-type]
    assert foreign is not None
    assert "run.http_hosts" in foreign.reason
    assert not foreign.headers


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"user-agent": "python-requests/2.32"}, False),
        ({"user-agent": "Python/3.11 aiohttp/3.14"}, False),
        ({}, False),
        ({"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"}, True),
        ({"origin": "null"}, True),
        ({"sec-fetch-mode": "no-cors"}, True),
    ],
)
def test_a_browser_cannot_hide(headers: dict[str, str], expected: bool) -> None:
    assert is_browser(lambda name: headers.get(name, "")) == expected


def test_a_token_in_an_address_comes_out_as_it_went_in() -> None:
    assert split_token(with_token("", TOKEN) + "/w/maths-0/info") == (TOKEN, "/w/maths-0/info")
    assert split_token("/t/") == ("", "/")
    assert split_token("/info") == ("", "/info")
    assert with_token("http://a:1", "") == "http://a:1"
    assert authorization("") == {}


def told(access: HttpAccess, token: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Return status and reason of a refusal; 200 and nothing for none."""
    refused = access.refusal(lambda _: "", token, path, method=method)
    return (200, "") if refused is None else (refused.status, refused.reason)


def test_the_token_of_a_key_opens_the_paths_of_its_role(tmp_path: Path) -> None:
    keys = KeyDirectory.create(tmp_path / "keys")
    tokens = {role: keys.new(f"{role.value}-7", role).token for role in Role}
    write_private(tmp_path / "token", TOKEN.encode())
    run = RunConfig(
        run=RunSection(http_token_file=Path("token")), broker=BrokerConfig(keys="keys"), base_dir=tmp_path
    )
    access = access_of(run, Server.GATEWAY, "gate.example")
    assert "gate.example" in access.hosts
    assert told(access, tokens[Role.WORKER], "/scored_data", "POST")[0] == 200
    assert told(access, tokens[Role.WORKER], "/register", "POST") == (
        403,
        "key worker-7 (role worker) may not POST /register; use a key of role admin or trainer",
    )
    assert told(access, tokens[Role.TRAINER], "/scored_data", "POST")[0] == 403
    assert told(access, tokens[Role.MONITOR], "/metrics")[0] == 200
    for token in (tokens[Role.ADMIN], TOKEN):
        assert told(access, token, "/reset_data", "POST")[0] == 200
    assert told(access, tokens[Role.ADMIN] + "x", "/health")[0] == 401
    assert told(access, "", "/health")[0] == 401


def test_a_revoked_key_is_refused_without_a_restart(tmp_path: Path) -> None:
    now = [0.0]
    keys = KeyDirectory.create(tmp_path / "keys")
    token = keys.new("worker-7", Role.WORKER).token
    run = RunConfig(broker=BrokerConfig(keys="keys"), base_dir=tmp_path)
    access = access_of(run, Server.ENGINE, "127.0.0.1")
    access.tokens._clock = lambda: now[0]
    assert told(access, token, "/v1/completions", "POST")[0] == 200
    keys.revoke("worker-7")
    now[0] += 1.0
    status, why = told(access, token, "/v1/completions", "POST")
    assert (status, why) == (
        401,
        "authorization: key worker-7 was revoked; get another one, of `rolloutmq keys new`",
    )
    newer = keys.new("worker-8", Role.WORKER).token
    now[0] += 1.0
    assert told(access, newer, "/v1/completions", "POST")[0] == 200


def test_a_server_does_not_start_with_a_damaged_list(tmp_path: Path) -> None:
    keys = KeyDirectory.create(tmp_path / "keys")
    keys.authorized.write_bytes(b"{")
    run = RunConfig(broker=BrokerConfig(keys="keys"), base_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"authorized\.json: is damaged"):
        access_of(run, Server.ENGINE, "127.0.0.1")
