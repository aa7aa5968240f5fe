"""Who may send a request to the HTTP servers: the rules, without a server."""

import os
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.files import write_private
from rolloutmq.schemas.config.run import RunConfig, RunSection
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.http_server.access import (
    HttpAccess,
    access_of,
    authorization,
    http_token,
    is_browser,
    split_token,
    with_token,
)

TOKEN = "0123456789abcdef"
OPEN = HttpAccess(frozenset({"box.lab.example"}), frozenset({"http://page.example"}))


def status(access: HttpAccess, given: str = "", /, *, preflight: bool = False, **headers: Any) -> int:
    """Return the status of a refusal, 200 for none."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    refused = access.refusal(lambda name: named.get(name, ""), given, preflight=preflight)
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
    guarded = HttpAccess(token=TOKEN)
    assert status(guarded, given, authorization=header) == expected
    assert status(guarded, given, authorization=header, preflight=True) == 200
    assert status(OPEN, given, authorization=header) == 200


def test_a_refusal_says_what_to_do() -> None:
    refused = HttpAccess(token=TOKEN).refusal(lambda _: "", "")
    assert refused is not None
    assert refused.headers == {"www-authenticate": "Bearer"}
    assert TOKEN not in refused.reason
    foreign = OPEN.refusal({"host": "evil.example"}.get, "")  # type: ignore[arg-type]
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


def with_file(path: Path, text: str | None) -> RunConfig:
    if text is not None:
        write_private(path, text.encode())
    return RunConfig(run=RunSection(http_token_file=Path(path.name)), base_dir=path.parent)


def test_the_token_is_in_a_file_beside_the_configuration(tmp_path: Path) -> None:
    run = with_file(tmp_path / "token", f"{TOKEN}\n")
    assert http_token(run) == TOKEN
    assert access_of(run, "gate.example").token == TOKEN
    assert "gate.example" in access_of(run, "gate.example").hosts
    assert http_token(RunConfig()) == ""


@pytest.mark.parametrize(
    "text", [None, "", "short", "with a space in it", f"{TOKEN}\n{TOKEN}", "\u00e9" * 20]
)
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str | None) -> None:
    with pytest.raises(ConfigError, match=r"^run\.http_token_file: ") as refused:
        http_token(with_file(tmp_path / "token", text))
    assert not text or text not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o620, 0o601])
def test_a_token_that_others_may_know_is_refused(tmp_path: Path, mode: int) -> None:
    run = with_file(path := tmp_path / "token", TOKEN)
    path.chmod(mode)
    problem = rf"^run\.http_token_file: {path} .*mode {mode:04o}\); run chmod 600 {path},"
    with pytest.raises(ConfigError, match=problem) as refused:
        http_token(run)
    assert TOKEN not in str(refused.value)
    path.chmod(0o400)
    assert http_token(run) == TOKEN


def test_a_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, user = with_file(tmp_path / "token", TOKEN), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(
        ConfigError, match=rf"^run\.http_token_file: .* \(got user {user}\); use a file of your own"
    ):
        http_token(run)
