"""A thousand workers: only those in view exist in the page, and scrolling does not halt it."""

import pytest
from tests.services.dashboard.page import figures
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.played_server import PlayedServer

pytestmark = pytest.mark.rival
ROWS = "return document.querySelectorAll('.workers tbody tr:not(.spacer)').length"
FIRST = "return document.querySelector('.workers tbody tr:not(.spacer) th').textContent"


@pytest.fixture
def thousand(browser: Browser, played: PlayedServer) -> PlayedServer:
    played.workers = figures.workers(1000)
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show("workers")
    browser.until_text("#workers", "1,000 workers")
    browser.until_text(".workers", "add2-0")
    return played


@pytest.mark.usefixtures("thousand")
def test_scrolling_through_all_of_them_makes_no_row_anew(browser: Browser) -> None:
    """A scroll that creates no element costs the same with a thousand rows as with forty, on any machine."""
    script = """
    const done = arguments[0], box = document.querySelector('.worker-box'), rows = [];
    let made = 0;
    const observer = new MutationObserver((all) => { for (const one of all) made += one.addedNodes.length; });
    observer.observe(box.querySelector('tbody'), {childList: true});
    const step = () => {
      box.scrollTop += 400;
      rows.push(box.querySelectorAll('tbody tr').length);
      if (box.scrollTop + box.clientHeight < box.scrollHeight - 1) requestAnimationFrame(step);
      else requestAnimationFrame(() => { observer.disconnect(); done([Math.max(...rows), rows.length, made]); });
    };
    requestAnimationFrame(step);
    """
    most, steps, made = browser.driver.execute_async_script(script)
    assert most < 80
    assert steps > 50
    assert made < 80
    browser.until(
        lambda: (
            "…"
            not in browser.js(
                "return document.querySelector('.workers tbody tr:nth-last-child(2) th').textContent"
            )
        ),
        "the last row",
    )
    assert (
        browser.js(
            "return Number(document.querySelector('.workers tbody tr:nth-last-child(2)').getAttribute('aria-rowindex'))"
        )
        == 1001
    )
    assert (
        browser.js("return Number(document.querySelector('.workers').getAttribute('aria-rowcount'))") == 1001
    )
    assert browser.complaints() == []


def test_only_windows_are_asked_for(browser: Browser, thousand: PlayedServer) -> None:
    assert {query["limit"] for query in thousand.queries} == {"100"}
    asked = len(thousand.queries)
    browser.js("document.querySelector('.worker-box').scrollTop = 500 * 28")
    browser.until(lambda: any(query["offset"] == "500" for query in thousand.queries), "the window from 500")
    assert len(thousand.queries) <= asked + 3


def test_sort_and_filter_are_of_all_and_not_of_those_in_view(
    browser: Browser, thousand: PlayedServer
) -> None:
    browser.click(".workers th[data-column=produced] button")
    browser.click(".workers th[data-column=produced] button")
    most = max(row["produced"] for row in thousand.workers)
    browser.until(
        lambda: (
            browser.js(
                "return document.querySelector('.workers tbody tr:nth-child(2) td:nth-child(5)').textContent"
            )
            == str(most)
        ),
        "the most productive first",
    )
    assert (
        browser.js("return document.querySelector('th[data-column=produced]').getAttribute('aria-sort')")
        == "descending"
    )
    browser.js(
        "const n = document.getElementById('worker-filter'); n.value = 'add2-99'; n.dispatchEvent(new Event('input'))"
    )
    browser.until_text("#workers", "5 of 1,000 workers match")
    assert browser.js(ROWS) == 5
    browser.js(
        "const n = document.getElementById('worker-filter'); n.value = 'none such'; n.dispatchEvent(new Event('input'))"
    )
    browser.until_text("#workers", "0 of 1,000 workers match")
    assert browser.js(ROWS) == 0


def test_a_change_is_shown_where_one_has_scrolled_to(browser: Browser, thousand: PlayedServer) -> None:
    browser.js("document.querySelector('.worker-box').scrollTop = 300 * 28")
    browser.until(lambda: browser.js(FIRST) not in {"…", "add2-0"}, "rows from 288 on")
    name, top = browser.js(FIRST), browser.js("return document.querySelector('.worker-box').scrollTop")
    for row in thousand.workers:
        row["produced"] += 1000
    thousand.change(workers_version=2)
    browser.until(
        lambda: (
            len(
                browser.js(
                    "return document.querySelector('.workers tbody tr:nth-child(3) td:nth-child(5)').textContent"
                )
            )
            == 5
        ),
        "the new count",
    )
    assert browser.js(FIRST) == name
    assert browser.js("return document.querySelector('.worker-box').scrollTop") == top


def test_one_worker_in_detail_and_its_drain(browser: Browser, thousand: PlayedServer) -> None:
    browser.js(
        "const n = document.getElementById('worker-filter'); n.value = 'waiting'; n.dispatchEvent(new Event('input'))"
    )
    browser.until_text("#workers", "match")
    browser.until(lambda: "waiting" in browser.text(".workers tbody"), "those that wait")
    browser.click(".workers tbody button")
    browser.until_text("dialog .log", "ZeroDivisionError")
    assert "\n".join(browser.violations()) == ""
    name = browser.text("dialog h2")
    browser.js(
        "[...document.querySelectorAll('dialog button')].find((b) => b.textContent.startsWith('Drain')).click()"
    )
    browser.until_text("dialog", f"Drain {name}?")
    browser.click("dialog button[type=submit]")
    browser.until_text("dialog .answer", "done as asked")
    assert thousand.actions == [("drain", {"worker": name})]
