"""The door of a real gateway: web pages of others change nothing, and a token keeps strangers out."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.services.gateway.site import ENVIRONMENT, TRAINER, Opened, Site, configured, listening, scored

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.config.run import RunSection
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.http_server.run_token import http_token, with_own_token

TOKEN = "0123456789abcdef-0123456789abcdef"
FOREIGN: dict[str, dict[str, str]] = {
    "another page": {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
    "a page of another port": {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},
    "a file": {"Origin": "null"},
    "a link or an image": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a name pointed here": {"Host": "evil.example:8000"},
}
BODIES: dict[str, Any] = {"/register": TRAINER, "/register-env": ENVIRONMENT, "/scored_data": scored(9)}


async def statuses(one: Site, headers: dict[str, str]) -> dict[str, int]:
    """Return the status of each request that changes something, sent as a web page can without asking."""
    told = {}
    plain = {"Content-Type": "text/plain", **headers}
    for path, body in BODIES.items():
        async with one.session.post(path, data=json.dumps(body), headers=plain) as answer:
            told[path] = answer.status
    for path in ("/reset_data", "/batch", "/status", "/health"):
        async with one.session.get(path, headers=headers) as answer:
            told[path] = answer.status
    return told


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
async def test_a_foreign_page_neither_resets_nor_poisons_a_run(site: Opened, headers: dict[str, str]) -> None:
    async with site() as one:
        await one.begin()
        await one.enrol()
        for tag in range(3):
            await one.post("/scored_data", scored(tag))
        assert set((await statuses(one, headers)).values()) == {403}
        assert await one.get("/status") == {"current_step": 0, "queue_size": 3}
        assert (await one.get("/info"))["batch_size"] == TRAINER["batch_size"]
        assert await one.tags() == [0, 1]


async def test_a_get_of_a_browser_changes_nothing_and_its_post_does(site: Opened) -> None:
    """A link to an address that is not this machine's comes without `Sec-Fetch-Site`."""
    browser = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0"}
    async with site() as one:
        await one.begin()
        await one.post("/scored_data_list", [scored(tag) for tag in range(4)])
        for path in ("/reset_data", "/batch"):
            async with one.session.get(path, headers=browser) as answer:
                assert answer.status == 403
                assert "a GET of a browser changes nothing" in await answer.text()
        async with one.session.get("/status", headers=browser) as answer:
            assert await answer.json() == {"current_step": 0, "queue_size": 4}
        own = browser | {"Origin": str(one.session._base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        async with one.session.post("/reset_data", headers=own) as answer:
            assert answer.status == 200
        assert (await one.get("/status"))["queue_size"] == 0


async def test_an_allowed_page_may_ask_first_and_then_send(site: Opened) -> None:
    page = {"Origin": "http://page.example", "Sec-Fetch-Site": "cross-site"}
    async with site(cors_origins=("http://page.example",)) as one:
        async with one.session.options("/register", headers=page) as answer:
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == "http://page.example"
        async with one.session.post("/register", json=TRAINER, headers=page) as answer:
            assert answer.status == 200
        async with one.session.options("/register", headers={"Origin": "http://evil.example"}) as answer:
            assert answer.status == 403
            assert "Access-Control-Allow-Origin" not in answer.headers


async def test_the_body_of_a_refused_request_is_not_read(site: Opened) -> None:
    async with site() as one:
        headers = {"Host": "evil.example", "Content-Length": str(32 << 20)}
        address = one.session._base_url
        assert address is not None
        reader, writer = await asyncio.open_connection(address.host, address.port)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"POST /scored_data HTTP/1.1\r\n{head}\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
        writer.close()
        await writer.wait_closed()


async def test_a_token_opens_and_nothing_else(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    token = run_dir / "token"
    write_private(token, TOKEN.encode())
    config = configured()
    config = config.model_copy(update={"run": RunSection(http_token_file=token)})
    write_json(layout.config, config)
    with running_broker(config, layout):
        async with listening(run_dir) as one:
            url = str(one.session._base_url).rstrip("/")
            assert set((await statuses(one, {})).values()) == {401}
            assert set((await statuses(one, {"Authorization": f"Bearer {TOKEN}x"})).values()) == {401}
            async with one.session.get("/metrics") as answer:
                assert answer.headers["WWW-Authenticate"] == "Bearer"
            known = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(url, headers=known) as session:
                told = Site(session, layout)
                await told.begin()
                await told.enrol()
            async with aiohttp.ClientSession() as session:
                for path, expected in (("", 401), (f"/t/{TOKEN}", 200), (f"/t/{TOKEN}x", 401)):
                    async with session.get(f"{url}{path}/info") as answer:
                        assert answer.status == expected, path
                async with session.get(f"{url}/t/{TOKEN}/w/nobody/info") as answer:
                    assert answer.status == 404


async def test_each_role_has_its_paths(run_dir: Path) -> None:
    layout, keys = RunLayout(run_dir), KeyDirectory.create(run_dir / "keys")
    tokens = {role: keys.new(f"{role.value}-7", role).token for role in Role}
    config = with_own_token(configured(keys=str(keys.path)), layout)
    write_json(layout.config, config)
    with running_broker(config, layout):
        async with listening(run_dir) as one:
            url = str(one.session._base_url).rstrip("/")

            async def ask(method: str, path: str, role: Role | None, body: Any = None) -> tuple[int, str]:
                token = tokens[role] if role is not None else "no-token-at-all-7"
                async with one.session.request(method, f"/t/{token}{path}", json=body) as answer:
                    told = await answer.text()
                    assert token not in told
                    assert token not in str(answer.headers)
                    return answer.status, told

            assert set((await statuses(one, {})).values()) == {401}
            assert (await ask("POST", "/register", None, TRAINER))[0] == 401
            assert await ask("POST", "/register", Role.WORKER, TRAINER) == (
                403,
                '{"detail":"key worker-7 (role worker) may not POST /register; '
                'use a key of role admin or trainer"}',
            )
            assert (await ask("POST", "/register", Role.TRAINER, TRAINER))[0] == 200
            assert (await ask("GET", "/batch", Role.TRAINER))[0] == 200
            assert (await ask("POST", "/register-env", Role.TRAINER, ENVIRONMENT))[0] == 403
            assert (await ask("POST", "/register-env", Role.WORKER, ENVIRONMENT))[0] == 200
            assert (await ask("POST", "/scored_data", Role.WORKER, scored(9)))[0] == 200
            assert (await ask("GET", "/metrics", Role.MONITOR))[0] == 200
            assert (await ask("GET", "/batch", Role.MONITOR))[0] == 403
            for role in set(Role) - {Role.ADMIN}:
                assert (await ask("POST", "/reset_data", role))[0] == 403
            assert (await ask("POST", "/reset_data", Role.ADMIN))[0] == 200
            own = {"Authorization": f"Bearer {http_token(config)}"}
            async with aiohttp.ClientSession(url, headers=own) as session:
                await Site(session, layout).begin()
