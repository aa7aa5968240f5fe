"""A real browser without a screen, and what a test asks of it."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER: Final = shutil.which("chromedriver")
MISSING: Final = "no Chromium with its driver: apt-get install chromium chromium-driver"
PATIENCE_S: Final = 60.0
AXE: Final = Path(__file__).parents[4] / ".venv-browser" / "node_modules" / "axe-core" / "axe.min.js"
ARGUMENTS: Final = (
    "--headless=new",
    "--no-sandbox",  # of Chromium, which needs rights that a container lacks; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--lang=en",
)


class Browser:
    """One window."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        for argument in ARGUMENTS:
            options.add_argument(argument)
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver: Any = webdriver.Chrome(options, Service(DRIVER))
        self.driver.set_script_timeout(PATIENCE_S)

    def close(self) -> None:
        self.driver.quit()

    def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the page in CSS pixels, and the colours that the system prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, address: str) -> None:
        """Open an address with a browser that knows nothing of a page before."""
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.complaints()
        self.driver.get(address)

    def js(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """Return the text of the first element, as a person sees it; empty if there is none."""
        found = self.js(
            "const node = document.querySelector(arguments[0]); return node ? node.innerText : ''", selector
        )
        return str(found)

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Wait until something holds, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}")
            time.sleep(0.02)
        return found

    def until_text(self, selector: str, wanted: str) -> None:
        """Wait until the text of an element has a part."""
        self.until(
            lambda: wanted in self.text(selector),
            f"{wanted!r} in {selector}, which has {self.text(selector)!r}",
        )

    def click(self, selector: str) -> None:
        """Click the first element, wherever it is; it has the focus, as after a click of a mouse."""
        self.until(lambda: self.js("return document.querySelector(arguments[0])", selector), selector)
        self.js(
            "const n = document.querySelector(arguments[0]); n.scrollIntoView({block: 'center'}); n.focus(); n.click()",
            selector,
        )

    def show(self, section: str) -> None:
        """Scroll a section into view: only then it is drawn."""
        self.js("document.getElementById(arguments[0]).scrollIntoView()", section)

    def press(self, *keys: str) -> None:
        """Press keys, whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.driver, duration=0)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def complaints(self) -> list[str]:
        """Return what the browser's console has shown since the last call: errors, warnings, breaches of the policy."""
        return [
            f"{one['level']}: {one['message']}"
            for one in self.driver.get_log("browser")
            if one["level"] != "INFO"
        ]

    def violations(self) -> list[str]:
        """Return what axe finds, by WCAG 2.2 AA and its best practices."""
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
        script = (
            "const done = arguments[0];"
            "axe.run(document, {resultTypes: ['violations']}).then((r) => done(JSON.stringify(r.violations)))"
        )
        found = json.loads(self.driver.execute_async_script(script))
        return [
            f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:4]}" for one in found
        ]

    def picture(self, path: Path) -> None:
        """Save what the window shows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(path))
