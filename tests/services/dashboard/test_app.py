"""Who may read and act, what each reply carries, and what a wrong request gets."""

import random
import socket
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from tests.services.dashboard.browser import Browser
from tests.services.dashboard.serving import opened, serving

from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.dashboard.app import SECURITY
from rolloutmq.services.dashboard.page_files import PAGE

READS = (
    *("/api/state", "/api/history", "/api/history?since=0.3", "/api/workers", "/api/dead"),
    "/api/workers?sort=produced&order=desc&filter=x&offset=5&limit=10",
    *("/api/latencies?by=host", "/api/latencies?by=worker&filter=x&limit=10"),
)
ACT = "/api/actions/drain"


def test_the_token_is_exchanged_once_for_a_cookie(ended: RunLayout) -> None:
    with serving(ended.root) as browser:
        assert browser.get("/api/state").code == "session"
        answer = browser.enter()
        assert (answer.status, answer.body) == (204, b"")
        cookie = SimpleCookie(answer.headers["Set-Cookie"])[f"rolloutmq-{browser.port}"]
        assert cookie["httponly"] is True
        assert (cookie["samesite"], cookie["path"], cookie["domain"]) == ("Strict", "/", "")
        assert browser.token not in cookie.value
        assert browser.state()["run"]["name"] == "sort"
        again = Browser(f"{browser.origin}/#token={browser.token}")
        assert (again.enter().status, again.cookie) == (401, "")
        assert browser.enter().status == 204, "the same browser opens the link again"


@pytest.mark.parametrize(
    "body", ["", "[]", "{", '{"token": 3}', '{"token": null}', "\0", "{}", '{"token": ""}']
)
def test_what_is_no_token_opens_nothing(ended: RunLayout, body: str) -> None:
    with serving(ended.root) as browser:
        answer = browser.post("/api/session", body.encode() or b"x")
        assert answer.status in {400, 401}
        assert "Set-Cookie" not in answer.headers
        assert browser.enter().status == 204


def test_no_reply_repeats_a_token_of_the_path(at_ended: Browser) -> None:
    token = "s3cret-token-of-a-key"
    answer = at_ended.ask("GET", f"/t/{token}/api/state")
    assert answer.status == 404
    assert b"/api/state: the page takes no token in a path; send `Authorization" in answer.body
    assert token.encode() not in answer.body
    answer = at_ended.post(f"/t/{token}/api/state", "{}")
    assert (answer.status, token.encode() in answer.body) == (405, False)


@pytest.mark.parametrize("path", [*READS, "/api/events", "/api/dead/g1", "/api/nothing"])
def test_reading_needs_the_cookie(at_ended: Browser, path: str) -> None:
    name, _, value = at_ended.cookie.partition("=")
    for cookie in (
        "",
        f"{name}=",
        f"{name}=0.{value}",
        f"{name}={value[:-1]}",
        f"other={value}",
        f"{name}=\xff",
    ):
        answer = at_ended.get(path, Cookie=cookie)
        assert (answer.status, answer.code) == (401, "session"), cookie
        assert b"sort3" not in answer.body


def test_an_action_needs_the_cookie_and_the_own_origin(at_ended: Browser) -> None:
    own = {"Origin": at_ended.origin, "Content-Type": "application/json"}
    body = '{"worker": "sort3-0"}'
    assert at_ended.ask("POST", ACT, body, **own).status == 401
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": f"http://127.0.0.1:{at_ended.port + 1}"},
        {"Origin": f"http://localhost:{at_ended.port}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": f"evil.example:{at_ended.port}"},
    ):
        answer = at_ended.post(ACT, body, **headers)
        assert (answer.status, answer.code) == (403, "refused"), headers
    assert (
        at_ended.ask("POST", ACT, body, Cookie=at_ended.cookie, **{"Content-Type": "application/json"}).status
        == 403
    )
    assert at_ended.post(ACT, body, **{"Content-Type": "text/plain"}).status == 415
    assert at_ended.post(ACT, body).code == "read_only"


@pytest.mark.parametrize("path", ["/", "/static/index.html", "/api/state", "/api/session"])
def test_no_foreign_page_and_no_other_name_reaches_it(at_ended: Browser, path: str) -> None:
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"127.0.0.1.evil.example:{at_ended.port}"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ):
        answer = at_ended.get(path, **headers)
        assert (answer.status, answer.code) == (403, "refused"), headers


def test_a_link_elsewhere_opens_the_page_and_nothing_of_the_run(at_ended: Browser) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert at_ended.get("/", **foreign).status == 200
    assert at_ended.get("/api/state", **foreign).status == 403


def test_every_reply_has_the_headers(at_ended: Browser) -> None:
    answers = [at_ended.get(path) for path in ("/", *READS, "/nothing", "/api/dead/g1", "/static/../app.py")]
    answers += [at_ended.post(ACT, "{}"), at_ended.post("/api/state", "{}"), at_ended.ask("PUT", "/")]
    answers += [at_ended.ask("GET", "/api/state"), at_ended.get("/", Host="evil.example")]
    for answer in answers:
        for name, value in SECURITY.items():
            assert answer.headers[name] == value
        assert answer.headers["Cache-Control"] in {"no-store", "no-cache"}
        assert "Access-Control-Allow-Origin" not in answer.headers
    policy = SECURITY["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    with at_ended.stream() as stream:
        assert stream.headers["Content-Security-Policy"] == policy
        assert stream.headers["Content-Type"] == "text/event-stream"


@pytest.mark.parametrize("sent", [b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: \x00\r\n\r\n"])
def test_what_is_no_http_gets_the_headers_too(at_ended: Browser, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", at_ended.port), 60) as peer:
        peer.sendall(sent)
        reply = peer.makefile("rb").read().decode()
    assert reply.split()[1] == "400"
    for name, value in SECURITY.items():
        assert f"\r\n{name}: {value}\r\n" in reply
    assert "\r\nCache-Control: no-store\r\n" in reply


def test_every_file_of_the_page_is_served_and_no_other(at_ended: Browser) -> None:
    names = [path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file()]
    names = [name for name in names if not name.endswith((".py", ".pyc"))]
    assert "index.html" in names
    for name in names:
        answer = at_ended.ask("GET", f"/static/{name}")
        assert (answer.status, answer.body) == (200, (PAGE / name).read_bytes()), name
        assert at_ended.ask("GET", f"/static/{name}", If_None_Match=answer.headers["ETag"]).status == 304
    assert at_ended.ask("GET", "/").body == (PAGE / "index.html").read_bytes()
    for name in (
        *("../app.py", "../__init__.py", "%2e%2e/app.py", "..%2fapp.py", "style/../../app.py", "/etc/passwd"),
        *(
            "",
            ".",
            "..",
            "style",
            "no.js",
            "index.html/",
            "index.html%00.js",
            "style//page.css",
            "a" * 5000 + ".js",
        ),
    ):
        assert at_ended.ask("GET", f"/static/{name}").status == 404, name


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("PUT", "/api/state", 405),
        ("DELETE", "/api/actions/drain", 405),
        ("GET", "/api/actions/drain", 405),
        ("GET", "/api/session", 405),
        ("GET", "/api", 404),
        ("GET", "/api/", 404),
        ("GET", "//", 404),
        ("GET", "/api/nothing", 404),
        ("GET", "/api/workers?sort=nothing", 400),
        ("GET", "/api/latencies", 400),
        ("GET", "/api/latencies?by=env", 400),
        ("GET", "/api/latencies?by=host&limit=-1", 400),
        ("GET", "/api/workers?order=up", 400),
        ("GET", "/api/workers?offset=-1", 400),
        ("GET", "/api/workers?limit=99999999999999999999", 400),
        ("GET", "/api/workers?limit=%D9%A3", 400),
        ("GET", "/api/dead?offset=x", 400),
        ("GET", "/api/dead/g1?order=x", 400),
        ("GET", "/api/dead/%00", 404),
        ("GET", "/api/dead/..%2f..%2fconfig.json?order=999999999999999999", 404),
        ("GET", "/api/history?since=x.y", 200),
        ("GET", "/api/history?since=0.99999999999999999999999", 200),
        ("GET", "/api/history?since=999.1", 200),
    ],
)
def test_a_wrong_request_is_told(at_ended: Browser, method: str, path: str, status: int) -> None:
    answer = at_ended.ask(method, path, Cookie=at_ended.cookie, Origin=at_ended.origin)
    assert answer.status == status
    if status >= 400:
        assert answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("workers?offset=-1", "offset: must be a number of at most 18 digits (got '-1')"),
        ("workers?limit=x", "limit: must be a number of at most 18 digits (got 'x')"),
        ("dead/g1?sequence=x", "sequence: must be a number of at most 18 digits (got 'x')"),
        ("workers?order=DROP", "order: must be asc or desc (got 'DROP')"),
        ("workers?sort=nothing&order=DROP", "sort: must be one of worker, env, "),
    ],
)
def test_a_wrong_key_is_told_alone(at_ended: Browser, path: str, problem: str) -> None:
    answer = at_ended.ask("GET", f"/api/{path}", Cookie=at_ended.cookie)
    assert (answer.status, answer.code) == (400, "bad_request")
    assert answer.json["error"]["message"].startswith(problem)


def test_an_unknown_action_and_a_wrong_body_are_told(at_living: Browser) -> None:
    assert at_living.post("/api/actions/nothing", "{}").status == 404
    for body in (
        "",
        "{",
        "[]",
        "{}",
        '{"worker": 3}',
        '{"worker": ""}',
        '{"worker": "x", "y": 1}',
        '{"worker":"\\u0000"}',
    ):
        answer = at_living.post(ACT, body.encode() or b"\xff")
        assert (answer.status, answer.code) == (400, "bad_request"), body
    assert at_living.post(ACT, b"x" * (1 << 17)).status == 413


def test_a_request_of_any_bytes_never_breaks_the_server(at_ended: Browser) -> None:
    chance = random.Random(3)
    good = (
        f"POST /api/actions/drain HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: {at_ended.origin}\r\n"
        f'Cookie: {at_ended.cookie}\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{{"worker":"x"}}'
    ).encode()
    statuses = set()
    for _ in range(300):
        sent = bytearray(good)
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(sent))
            sent[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
        sent = sent[: chance.choice((len(sent), chance.randrange(1, len(sent))))]
        with socket.create_connection(("127.0.0.1", at_ended.port), 20) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(1 << 16)
        if answer:
            assert answer.startswith(b"HTTP/1."), answer
            statuses.add(int(answer.split(b" ")[1]))
    assert all(200 <= status < 500 for status in statuses), statuses
    assert at_ended.state()["run"]["life"] == "ended"


def test_looking_changes_no_file(ended: RunLayout) -> None:
    before = {path: path.stat().st_mtime_ns for path in [ended.root, *ended.root.rglob("*")]}
    with opened(ended.root) as browser, browser.stream() as stream:
        for path in READS:
            assert browser.get(path).status == 200
        stream.until("history")
    assert {path: path.stat().st_mtime_ns for path in [ended.root, *ended.root.rglob("*")]} == before


def test_the_package_has_the_page() -> None:
    assert Path(PAGE, "index.html").is_file()
