"""The page of the endpoints needs nothing from elsewhere."""

import asyncio
import json
import re
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
from tests.services.gateway.site import Opened

from rolloutmq.services.gateway.pages.docs import docs
from rolloutmq.services.gateway.pages.openapi import ENDPOINTS

NODE = shutil.which("node")


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = docs().decode()
    assert not re.search(r"https?:|//[a-z]|@import|\burl\(", page)
    assert re.findall(r"\b(?:src|href)=\"([^\"]*)\"", page) == ["data:,"]


async def test_a_browser_may_ask_this_gateway_alone(site: Opened) -> None:
    async with site() as one, one.session.get("/docs") as answer:
        assert answer.content_type == "text/html"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert await answer.read() == docs()


async def shown(url: str, *sent: str) -> Any:
    """Run the page's script; return its text, and the replies to the forms that are sent."""
    browser = Path(__file__).parent / "browse.js"
    running = await asyncio.create_subprocess_exec(
        str(NODE), str(browser), url, *sent, stdin=PIPE, stdout=PIPE
    )
    try:
        async with asyncio.timeout(60):
            told, _ = await running.communicate(docs())
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    return json.loads(told)


@pytest.mark.skipif(NODE is None, reason="there is no node to run the page's script")
async def test_the_page_shows_every_schema_and_its_forms_send_requests(site: Opened) -> None:
    register, group = "POST /register ", "POST /scored_data "
    async with site() as one:
        page = await shown(str(one.session._base_url).rstrip("/"), register, group, "GET /status ", "GET / ")
    for endpoint in ENDPOINTS:
        assert endpoint.path in page["text"]
        assert endpoint.summary in page["text"]
    assert "min_batch_allocation number | null default null Part of each batch" in page["text"]
    assert "tokens [[integer]] required" in page["text"]
    replies = page["replies"]
    assert replies[register]["status"] == "", "it may discard a queue, and was not confirmed"
    assert replies[group]["status"].startswith("200 in ")
    assert json.loads(replies["GET /status "]["reply"]) == {"current_step": 0, "queue_size": 1}
    assert json.loads(replies["GET / "]["reply"]) == {"message": "AtroposLib API"}
