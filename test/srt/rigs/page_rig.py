"""The page in a real browser: Debian's headless Chromium, or whatever Chrome is there."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
PATIENCE = 60.0  # seconds until the page must show what a test waits for
TOKENS = {"formatted": False, "specials": True}  # answers of a chat as tokens, all of them
DONE = "!document.querySelector('[data-act=send]').disabled"


def _programs() -> tuple[str, str] | None:
    """The browser and its driver."""
    folder = os.environ.get("CHROMEWEBDRIVER", "")  # where GitHub's machines have it
    driver = shutil.which("chromedriver") or shutil.which("chromedriver", path=folder)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    return (browser, driver) if browser and driver else None


@contextmanager
def browser() -> Iterator[Browser]:
    pytest.importorskip("selenium", reason="selenium is not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    programs = _programs()
    if programs is None:
        pytest.skip("no Chromium with its driver: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    folder = driver.capabilities["chrome"]["userDataDir"]  # no other browser has it
    try:
        yield Browser(driver)
    finally:
        driver.quit()
        # Debian's chromium-headless-shell is a script: its driver ends the shell that runs it, and
        # the browser would stay.
        for process in psutil.process_iter(["cmdline"]):
            if f"--user-data-dir={folder}" in (process.info["cmdline"] or []):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Browser:
    """What a visitor of the page does and sees."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.url = ""

    # ── the page ─────────────────────────────────────────────────────────────────────────────

    def open(
        self,
        url: str,
        key: str = "",
        width: int = 1280,
        scheme: str = "light",
        settings: dict[str, Any] = TOKENS,
    ) -> None:
        """key, settings: as a visitor who has given them has them."""
        self.url = url
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)
        # else what it still asks for is refused once the key is gone
        self.wait(
            "document.querySelector('#key:not([hidden])') ||"
            " ['server_info', 'tokenizer_info'].every((name) => performance"
            ".getEntriesByType('resource').some((each) => each.name.endsWith(name)))"
        )
        self.js("sessionStorage.clear(); localStorage.clear()")
        if key:
            kept = json.dumps(settings)
            self.js("localStorage.setItem('mamba-eagle-settings', arguments[0])", kept)
            self.js("sessionStorage.setItem('mamba-eagle-key', arguments[0])", key)
        self.logs()
        self.driver.get(url)
        shown = "#key:not([hidden])" if not key else "#model:not(:empty)"
        self.wait(f"document.querySelector('{shown}')")

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def module(self, name: str, script: str, *arguments: Any) -> Any:
        """What ``script`` returns, where ``it`` is the module of this name."""
        run = (
            "const done = arguments[arguments.length - 1], args = [...arguments].slice(0, -1);"
            f"import(new URL('page/{name}', document.baseURI)).then((it) => {{{script}}})"
            ".then(done, (error) => done({error: String(error)}))"
        )
        return self.driver.execute_async_script(run, *arguments)

    def wait(self, condition: str) -> Any:
        """Until an expression is true, and then its value."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.js(f"return {condition}")):
            assert time.monotonic() < deadline, f"{condition}: {self.text('#error')}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """All of it, what is folded as well; "" if it is not there."""
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.js(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)",
            selector,
        )

    def logs(self) -> tuple[list[str], list[str]]:
        """Errors in the console, and addresses asked for, since the last call."""
        errors = [entry["message"] for entry in self.driver.get_log("browser")]
        messages = (json.loads(entry["message"]) for entry in self.driver.get_log("performance"))
        asked = [
            each["message"]["params"]["request"]["url"]
            for each in messages
            if each["message"]["method"] == "Network.requestWillBeSent"
        ]
        return errors, asked

    # ── keys and settings ────────────────────────────────────────────────────────────────────

    def keys(self, *keys: str) -> None:
        """Typed wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def chord(self, modifier: str, key: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.driver, duration=0).key_down(modifier).send_keys(key)
        chain.key_up(modifier).perform()

    def control_enter(self) -> None:
        from selenium.webdriver.common.keys import Keys

        self.chord(Keys.CONTROL, Keys.ENTER)

    def tab_to(self, condition: str) -> None:
        """Presses Tab until ``condition``, of the element ``at`` that has the focus, is true."""
        from selenium.webdriver.common.keys import Keys

        for _ in range(60):
            if self.js(f"const at = document.activeElement; return Boolean({condition})"):
                return
            self.keys(Keys.TAB)
        raise AssertionError(f"Tab does not lead to {condition}")

    def reload(self) -> None:
        self.driver.get(self.url)
        self.wait("document.querySelector('#model:not(:empty)')")

    def set(self, **values: str) -> None:
        """Fields of the settings, and ``message`` or ``prompt``."""
        self.js(
            "for (const [name, value] of Object.entries(arguments[0])) {"
            " const field = document.querySelector(`#${name}, [name=${name}]`);"
            " if (field.type === 'checkbox') field.checked = value; else field.value = value;"
            " field.dispatchEvent(new Event('change', {bubbles: true})); }",
            values,
        )

    def press(self, selector: str) -> None:
        self.js("document.querySelector(arguments[0]).click()", selector)

    def send(self, tab: str) -> None:
        """Ends when the answer is complete or refused."""
        self.js(f"document.getElementById('tab-{tab}').click()")
        self.js(f"document.querySelector('#panel-{tab} [data-act=send]').click()")
        self.wait(DONE)

    def is_narrow(self) -> bool:
        """Whether nothing sticks out to the side."""
        return self.js(
            "const page = document.documentElement;"
            "return page.scrollWidth <= page.clientWidth && document.body.scrollWidth <="
            " document.body.clientWidth"
        )
