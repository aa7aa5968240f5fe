"""Names, completions and logs of a hostile policy: they are text, and they leave the page as it is."""

import random
from typing import Any

import pytest
from tests.services.dashboard.page import figures
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.played_server import PlayedServer
from tests.services.dashboard.page.test_looks import draw_all

pytestmark = pytest.mark.rival
SCRIPT = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
PIECES = (
    SCRIPT,
    "</script><!--",
    "\x1b[31mred\x1b[2J\x1b]0;title\x07",
    "\u202egnitrats\u202c\u2066\u2069",
    "\ud800",  # a surrogate without its partner, as JSON may carry it
    "javascript:window.broken=1",
    "'\"><svg onload=window.broken=1>",
    "e" + "\u0301" * 300,
    "\u200b\ufeff\u2060\U000e0041",
    "${window.broken = 1}{{broken}}",
    "<style>*{display:none}</style>",
    "line\nline\r\n\ttab\0null",
    "שלום العربية",
    "a" * 3000,
    "🙂" * 200,
)
MEGABYTE = "<b>token</b>\u202e" * 80_000


def hostile(value: Any, chance: random.Random) -> Any:
    """Return figures of the same shape, each text replaced or followed by hostile ones."""
    if isinstance(value, str):
        return "".join(chance.choices(PIECES, k=2)) + value
    if isinstance(value, list):
        return [hostile(one, chance) for one in value]
    if isinstance(value, dict):
        return {name: one if name in KEPT else hostile(one, chance) for name, one in value.items()}
    return value


FOREIGN = ", ".join(
    f"{place} {tag}"
    for place in ("header", "nav", "main", "dialog")
    for tag in ("script", "style", "img", "iframe", "object", "link", "a[href^=javascript]")
)
HANDLERS = (
    "return [...document.querySelectorAll('*')]"
    ".filter((n) => n.getAttributeNames().some((name) => name.startsWith('on'))).length"
)
KEPT = {"life", "hop", "split", "sort", "columns", "finding"}
"""Words that the server chooses, not the run."""


def intact(browser: Browser, width: int) -> None:
    """Check that nothing ran, nothing was made of a text, and nothing is wider than the page."""
    assert browser.js("return window.broken ?? null") is None
    assert browser.js("return document.querySelectorAll(arguments[0]).length", FOREIGN) == 0
    assert browser.js(HANDLERS) == 0
    assert browser.js("return document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [1440, 390])
def test_whatever_the_run_is_called_the_page_stands(
    browser: Browser, played: PlayedServer, seed: int, width: int
) -> None:
    chance = random.Random(seed)
    played.state = hostile(played.state, chance)
    played.state["run"]["life"] = "living"
    played.history = [{**one, "key": one["key"] + chance.choice(PIECES)} for one in played.history]
    played.workers = hostile(played.workers, chance)
    played.dead = hostile(played.dead, chance)
    browser.look(width)
    browser.open(played.link)
    browser.until_text(".badge", "live")
    draw_all(browser, width, "light")
    browser.until(
        lambda: browser.js("return document.querySelectorAll('.workers tbody tr').length") > 10, "workers"
    )
    browser.until_text("#dead", "4 dead groups")
    intact(browser, width)
    assert len(browser.js("return document.title")) < 200


def test_control_and_bidi_characters_are_shown_by_name(browser: Browser, played: PlayedServer) -> None:
    finding = {
        "env": "e\x1b[31m",
        "finding": "flat",
        "problem": "a\u202eb\x00c\ud800d\u200be",
        "remedy": "r",
        "at": 1.0,
    }
    played.state["findings"] = [finding]
    browser.open(played.link)
    browser.until_text("#findings", "a")
    marks = browser.js(
        "return [...document.querySelectorAll('#findings .hidden-char')].map((n) => n.textContent)"
    )
    assert marks == ["ESC", "U+202E", "NUL", "U+D800", "U+200B"]
    assert (
        browser.js(
            "return document.querySelector('#findings tbody').textContent.match(/[\\u202a-\\u202e\\u0000\\u001b]/)"
        )
        is None
    )


def test_a_megabyte_of_completion_is_cut_and_can_be_read_on(browser: Browser, played: PlayedServer) -> None:
    group = figures.dead_group("sort3-00000000")
    group["sequences"][0]["pieces"][1]["text"] = MEGABYTE
    group["sequences"][1]["pieces"][1]["text"] = "x" * 1_000_000
    group["history"] = [MEGABYTE]
    group["columns"][0]["preview"] = MEGABYTE
    played.groups["sort3-00000000"] = group
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show("dead")
    browser.until_text("#dead", "4 dead groups")
    browser.click("#dead tbody button.link")
    browser.until_text("dialog", "more characters")
    size = "return document.querySelector('dialog').textContent.length"
    before = browser.js(size)
    assert before < 40_000
    browser.click("dialog .piece button.link")
    browser.until(lambda: browser.js(size) > before + 7000, "the next part")
    assert browser.js(size) < before + 12_000 * 8  # a hidden character is shown by a longer name
    assert "<b>token</b>" in browser.text("dialog .trajectory .trained")
    intact(browser, 1440)


def test_a_log_of_a_worker_is_text(browser: Browser, played: PlayedServer) -> None:
    worker = {
        **played.workers[0],
        "last_lines": [*PIECES, MEGABYTE],
        "reason": MEGABYTE,
        "unwell": True,
        "trouble": SCRIPT,
    }
    played.workers = [worker]
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show("workers")
    browser.until_text("#workers", "sort3-0" if "sort3" in worker["worker"] else "add2-0")
    browser.click(".workers tbody button")
    browser.until_text("dialog .log", "<script>")
    assert browser.js("return document.querySelector('dialog').textContent.length") < 100_000
    intact(browser, 1440)
