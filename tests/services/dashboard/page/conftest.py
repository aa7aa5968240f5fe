"""Fixtures for a page in a real browser. Without Chromium the tests are skipped, and say what to install."""

from collections.abc import Iterator

import pytest
from tests.services.dashboard.page.browser import CHROMIUM, DRIVER, MISSING, Browser
from tests.services.dashboard.page.played_server import PlayedServer


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser of its own: no cookie, no storage and no process of a test before."""
    pytest.importorskip("selenium", reason="make test-dashboard sets up its environment")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    browser = Browser()
    try:
        browser.look(1440)
        yield browser
    finally:
        browser.close()


@pytest.fixture
def played() -> Iterator[PlayedServer]:
    """A served run of 24 workers."""
    server = PlayedServer()
    server.start()
    yield server
    server.stop()
