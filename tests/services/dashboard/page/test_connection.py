"""What the page says of its own numbers: fresh, old, of a run that is over, or not for this visitor."""

import pytest
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.played_server import PlayedServer

pytestmark = pytest.mark.rival


def test_the_token_leaves_the_address_before_anything_is_asked(
    browser: Browser, played: PlayedServer
) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    assert browser.js("return location.href") == f"http://127.0.0.1:{played.port}/"
    assert browser.js("return history.length") <= 3
    assert browser.js("return document.cookie") == ""
    kept = browser.js("return JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "played-token" not in kept
    assert not any(
        "token" in asked
        for asked in browser.js("return performance.getEntries().map((one) => one.name).slice(1)")
    )


def test_without_the_link_it_says_what_to_open(browser: Browser, played: PlayedServer) -> None:
    browser.open(f"http://127.0.0.1:{played.port}/")
    browser.until_text(".badge", "signed out")
    assert "Open the link that `rolloutmq dashboard` printed" in browser.text(".notice-line")
    opened = played.streams_opened
    browser.open(f"http://127.0.0.1:{played.port}/#token=wrong")
    browser.until_text(".badge", "signed out")
    assert "the token was used or is wrong" in browser.text(".notice-line")
    assert played.streams_opened == opened == 0


def test_a_link_opened_in_the_same_page_signs_in(browser: Browser, played: PlayedServer) -> None:
    browser.open(f"http://127.0.0.1:{played.port}/")
    browser.until_text(".badge", "signed out")
    browser.driver.get(played.link)
    browser.until_text(".badge", "live")


def test_a_restarted_server_is_found_again(browser: Browser, played: PlayedServer) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    played.stop()
    browser.until_text(".badge", "disconnected")
    assert "Values are old" in browser.text(".notice-line")
    browser.until_text(".age", "last heard")
    assert "1.12" in browser.text("#overview")
    played.state["run"]["step"] = 250
    played.start()
    browser.until_text(".badge", "live")
    browser.until_text(".progress", "step 250 of 300")
    assert browser.text(".notice-line") == ""


def test_a_server_that_ends_with_its_run_is_not_missed(browser: Browser, played: PlayedServer) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    played.tell("leave", {"text": "The run has ended; `rolloutmq dashboard runs/a` shows how.", "over": True})
    browser.until_text(".badge", "finished")
    played.stop()
    browser.until_text(".age", "last heard")
    assert browser.text(".badge") == "finished"
    assert browser.text(".notice-line") == "The run has ended; `rolloutmq dashboard runs/a` shows how."
    assert "left" not in browser.text(".progress")
    played.start()
    browser.until_text(".badge", "live")


def test_a_silent_server_makes_the_page_stale(browser: Browser, played: PlayedServer) -> None:
    played.beats = False
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.until_text(".badge", "stale")
    assert "the server is silent" in browser.text(".notice-line")
    played.tell("beat", {"at": 1.0})
    browser.until_text(".badge", "live")


def test_changes_arrive_by_themselves(browser: Browser, played: PlayedServer) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    played.change(run={**played.state["run"], "step": 215})
    browser.until_text(".progress", "step 215 of 300")
    played.change(queue={**played.state["queue"], "rollout_pressure": 0.31})
    browser.until_text("#overview .tiles", "0.31")
    assert "warn" in browser.js("return document.querySelector('.tile').className")
    rows = {"t": [1_764_200_400.0], "rollout_pressure": [7.5]}
    added = {"name": "queue", "key": "", "width_s": 1.0, "from": 400, "columns": rows}
    played.tell("history", {"cursor": "2", "reset": False, "series": [added]})
    browser.until_text("#flow .legend", "7.50")
    said = browser.js("return document.querySelector('#flow [role=img]').getAttribute('aria-label')")
    assert "pressure, batches: last 7.50, lowest 0.5" in said  # the rows before are still there
    assert played.streams_opened == 1


@pytest.mark.parametrize(
    ("life", "word"), [("ended", "finished"), ("dead", "launcher killed"), ("removed", "directory removed")]
)
def test_a_run_that_is_over_is_said_to_be(
    browser: Browser, played: PlayedServer, life: str, word: str
) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    ended = "the trainer is done"
    over = {
        **played.state["run"],
        "life": life,
        "text": f"it is over: {ended}",
        "ended": ended,
        "read_only": True,
        "read_only_why": "The run has ended.",
    }
    played.change(run=over)
    played.tell("end", {"text": ended})
    browser.until_text(".badge", word)
    assert ended in browser.text(".notice-line")
    browser.show("settings")
    browser.until_text("#settings", "The run has ended.")
    assert browser.js(
        "return [...document.querySelectorAll('#settings .action-cell button')].every((b) => b.disabled)"
    )


def test_a_record_that_is_still_read_is_said(browser: Browser, played: PlayedServer) -> None:
    played.state["record"]["loaded"] = 0.4
    played.state["run"]["step"] = None
    browser.open(played.link)
    browser.until_text(".badge", "reading")
    assert "The record of the run is being read: 40" in browser.text(".notice-line")
    assert "step 0" not in browser.text(".progress")


def test_environments_that_are_not_shown_are_counted(browser: Browser, played: PlayedServer) -> None:
    played.state["run"]["lanes"] = 1000
    shown = len(played.state["environments"])
    browser.open(played.link)
    browser.show("environments")
    browser.until_text("#environments .left-out", f"{shown} of 1,000 are shown")
