"""Keys open the page by their role: a monitor reads, an admin acts, and a revoked key does neither."""

import time
from pathlib import Path

import pytest
from tests.services.dashboard.browser import Browser
from tests.services.dashboard.serving import serving

from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.http_server.run_token import http_token, with_own_token

ACT = "/api/actions/drain"


@pytest.fixture
def keys(ended: RunLayout, tmp_path: Path) -> KeyDirectory:
    """The keys of the run that ended."""
    made = KeyDirectory.create(tmp_path / "keys")
    config, _ = load_run(ended.root)
    keyed = config.broker.model_copy(update={"keys": str(made.path)})
    write_json(ended.config, with_own_token(config.model_copy(update={"broker": keyed}), ended))
    return made


def holder(browser: Browser, token: str) -> Browser:
    """Return another browser, which opens the page with a token."""
    other = Browser(f"{browser.origin}/#token={token}")
    assert other.enter().status == 204
    return other


def test_a_monitor_reads_and_an_admin_acts(ended: RunLayout, keys: KeyDirectory) -> None:
    monitor, admin = (keys.new(role.value, role).token for role in (Role.MONITOR, Role.ADMIN))
    with serving(ended.root) as browser:
        for _ in range(2):  # unlike the token of the link
            reader = holder(browser, monitor)
            assert monitor not in reader.cookie
            assert reader.state()["run"]["name"] == "sort"
            refused = reader.post(ACT, {"env": "sort3"})
            assert refused.status == 403
            problem = "key monitor (role monitor) may not POST /api/actions/drain; use a key of role admin"
            assert refused.json["error"]["message"] == problem
        assert holder(browser, admin).post(ACT, {"env": "sort3"}).status not in {401, 403}
        assert browser.enter().status == 204, "the link was not used up"


def test_a_token_opens_it_in_a_header_too(ended: RunLayout, keys: KeyDirectory) -> None:
    monitor = keys.new("monitor", Role.MONITOR).token
    with serving(ended.root) as browser:
        assert browser.ask("GET", "/api/state", Authorization=f"Bearer {monitor}").status == 200
        assert browser.ask("GET", "/api/state", Authorization=f"Bearer {monitor}x").status == 401


@pytest.mark.parametrize("role", [Role.WORKER, Role.TRAINER, Role.ENGINE])
def test_other_roles_do_not_open_it(ended: RunLayout, keys: KeyDirectory, role: Role) -> None:
    token = keys.new("other", role).token
    with serving(ended.root) as browser:
        answer = browser.post("/api/session", {"token": token})
        assert answer.status == 403
        assert answer.json["error"]["message"].endswith("; use a key of role admin or monitor")
        assert "Set-Cookie" not in answer.headers
        assert browser.ask("GET", "/api/state", Authorization=f"Bearer {token}").status == 403


def test_the_token_of_the_runs_own_processes_does_not_open_it(ended: RunLayout, keys: KeyDirectory) -> None:
    assert keys
    own = http_token(load_run(ended.root)[0])
    with serving(ended.root) as browser:
        assert browser.post("/api/session", {"token": own}).status == 401


def test_a_revoked_key_ends_its_session(ended: RunLayout, keys: KeyDirectory) -> None:
    monitor = keys.new("monitor", Role.MONITOR).token
    with serving(ended.root) as browser:
        reader = holder(browser, monitor)
        keys.revoke("monitor")
        until = time.monotonic() + 60.0
        while (answer := reader.get("/api/state")).status == 200:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert answer.status == 401
        assert "key monitor was revoked" in answer.json["error"]["message"]
