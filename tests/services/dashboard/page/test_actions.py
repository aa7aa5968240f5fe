"""Actions: confirmed first, sent once, and answered in the words of the run. And the whole page by keyboard."""

from functools import partial
from typing import Any

import pytest
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.played_server import PlayedServer
from tests.services.dashboard.page.test_looks import SECTIONS

pytestmark = pytest.mark.rival
TAB, ENTER, ESCAPE, SPACE, SHIFT_TAB = "\ue004", "\ue007", "\ue00c", " ", "\ue008\ue004\ue008"


def focused(browser: Browser) -> str:
    """Return the name of what has the focus."""
    script = "const n = document.activeElement; return n.getAttribute('aria-label') ?? n.textContent.trim()"
    return str(browser.js(script))


def tab_to(browser: Browser, wanted: str, limit: int = 400) -> None:
    """Press Tab until something of that name has the focus."""
    for _ in range(limit):
        browser.press(TAB)
        if focused(browser).startswith(wanted):
            return
    raise AssertionError(f"{limit} times Tab did not reach {wanted!r}")


def is_in_view(browser: Browser, section: str) -> bool:
    top = "return document.getElementById(arguments[0]).getBoundingClientRect().top < innerHeight"
    return bool(browser.js(top, section))


def opened(browser: Browser, played: PlayedServer, section: str) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show(section)
    browser.until(lambda: len(browser.text(f"#{section}")) > 40, section)


def test_nothing_is_sent_without_a_confirmation(browser: Browser, played: PlayedServer) -> None:
    opened(browser, played, "environments")
    browser.click("#environments .action-cell button")
    browser.until_text("dialog", "Scale sort3")
    assert played.actions == []
    browser.press(ESCAPE)
    browser.until(lambda: not browser.js("return document.querySelector('dialog')"), "the dialog closes")
    assert played.actions == []
    assert focused(browser) == "Scale sort3"


@pytest.mark.parametrize(
    ("typed", "automatic", "sent"),
    [("5", False, {"env": "sort3", "count": 5}), ("5", True, {"env": "sort3", "count": None})],
)
def test_scale(
    browser: Browser, played: PlayedServer, typed: str, automatic: bool, sent: dict[str, Any]
) -> None:
    opened(browser, played, "environments")
    browser.click("#environments .action-cell button")
    browser.js("document.getElementById('scale-count').value = arguments[0]", typed)
    if automatic:
        browser.click("#scale-auto")
    browser.click("dialog button[type=submit]")
    browser.until_text("dialog .answer", "done as asked")
    assert played.actions == [("scale", sent)]
    browser.press(ENTER)  # on Close, which has the focus now
    browser.until(lambda: not browser.js("return document.querySelector('dialog')"), "the dialog closes")
    browser.show("settings")
    browser.until_text(".action-log", "done as asked")


def test_a_refusal_is_shown_as_the_run_gave_it(browser: Browser, played: PlayedServer) -> None:
    played.answer = {"ok": False, "code": 1, "text": ["error: GPU-0: already <b>cordoned</b>"]}
    opened(browser, played, "machines")
    browser.click("#machines .action-cell button")
    browser.click("dialog button[type=submit]")
    browser.until_text("dialog .answer .bad", "already <b>cordoned</b>")
    assert played.actions == [("cordon", {"gpu": played.state["gpus"][0]["uuid"], "reason": "asked"})]


def test_a_server_that_went_away_is_an_error_and_not_silence(browser: Browser, played: PlayedServer) -> None:
    opened(browser, played, "settings")
    browser.click("#settings .action-cell button")
    browser.until_text("dialog", "Set environment.sort3.weight")
    played.stop()
    browser.click("dialog button[type=submit]")
    browser.until_text("dialog .answer .bad", "does not answer")


def test_set_sends_numbers_as_numbers(browser: Browser, played: PlayedServer) -> None:
    opened(browser, played, "settings")
    browser.click("#settings .action-cell button")
    browser.js("document.getElementById('set-value').value = '2.5'")
    browser.click("dialog button[type=submit]")
    browser.until_text("dialog .answer", "done as asked")
    assert played.actions == [("set", {"values": {"environment.sort3.weight": 2.5}})]


def test_requeue_of_one_and_of_all(browser: Browser, played: PlayedServer) -> None:
    opened(browser, played, "dead")
    browser.until_text("#dead", "4 dead groups")
    browser.click("#dead .action-cell button")
    browser.click("dialog button[type=submit]")
    browser.until_text("dialog .answer", "done as asked")
    browser.press(ENTER)
    browser.click("#dead .buttons button:last-child")
    browser.until_text("dialog", "Queue all dead groups again?")
    browser.click("dialog button[type=submit]")
    browser.until(lambda: len(played.actions) == 2, "the second action")
    assert played.actions == [("requeue", {"groups": ["sort3-00000000"]}), ("requeue", {"all": True})]


def test_the_contents_of_a_dead_letter(browser: Browser, played: PlayedServer) -> None:
    opened(browser, played, "dead")
    browser.until_text("#dead", "4 dead groups")
    browser.click("#dead tbody button.link")
    browser.until_text("dialog", "Sort the digits 7 1 4")
    assert browser.js("return document.querySelectorAll('dialog .sequence').length") == 4
    browser.js(
        "[...document.querySelectorAll('dialog button')].find((b) => b.textContent.startsWith('Further')).click()"
    )
    browser.until(
        lambda: browser.js("return document.querySelectorAll('dialog .sequence').length") == 6, "all six"
    )
    assert "score 0.25" in browser.text("dialog")
    trained = "return getComputedStyle(document.querySelector('dialog .piece.trained')).backgroundColor"
    context = "return getComputedStyle(document.querySelector('dialog .sequence .piece:not(.trained)')).backgroundColor"
    assert browser.js(trained) != browser.js(context)
    assert "[trained on]" in browser.js("return document.querySelector('dialog .sequence').textContent")
    assert "\n".join(browser.violations()) == ""
    assert browser.complaints() == []


def test_every_section_and_an_action_by_keyboard_alone(browser: Browser, played: PlayedServer) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.press(TAB)
    assert focused(browser) == "Skip to the run"
    assert browser.js("return document.activeElement.getBoundingClientRect().top") >= 0
    for section in SECTIONS:
        browser.press(TAB) if section == SECTIONS[0] else None
        link = f"#nav a[href='#{section}']"
        for _ in range(40):
            if browser.js("return document.activeElement === document.querySelector(arguments[0])", link):
                break
            browser.press(TAB)
        else:
            raise AssertionError(f"no Tab reaches the link of {section}")
        outline = browser.js("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", section
        browser.press(ENTER)
        browser.until(partial(is_in_view, browser, section), section)
        browser.js("document.querySelector(arguments[0]).focus({preventScroll: true})", link)
    browser.js("document.body.focus(); document.querySelector('#nav a').focus()")
    tab_to(browser, "Scale sort3")
    browser.press(ENTER)
    browser.until_text("dialog", "Scale sort3")
    assert browser.js("return document.activeElement.id") == "scale-count"
    browser.press("7", ENTER)
    browser.until(lambda: played.actions, "the action")
    tab_to(browser, "Close", 10)
    browser.press(ENTER)
    browser.until(lambda: not browser.js("return document.querySelector('dialog')"), "the dialog closes")
    assert focused(browser) == "Scale sort3"
    tab_to(browser, "Workers, a list that scrolls", 60)
    browser.press("\ue010")  # End
    browser.until(
        lambda: browser.js("return document.querySelector('.worker-box').scrollTop") > 0, "the list scrolls"
    )
    tab_to(browser, "Set another key", 400)
    browser.press(SHIFT_TAB)
    assert browser.complaints() == []
