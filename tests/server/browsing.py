"""Pages in a real headless browser, used as a person uses them."""

import shutil
from contextlib import contextmanager

import pytest

from tests.waiting import until

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PHONE, DESKTOP = (390, 800), (1200, 900)


@contextmanager
def chromium():
    """A browser; the test is skipped where none is installed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if not BROWSER or not DRIVER:
        pytest.skip("no chromium with chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.implicitly_wait(5)
    try:
        yield driver
    finally:
        driver.quit()


def set_size(driver, size: tuple[int, int], dark: bool = False, scale: float = 1) -> None:
    """Set the size of the window and the colour scheme that the user's system prefers."""
    width, height = size
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": scale, "mobile": size == PHONE})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})


def forget(driver, url: str) -> None:
    """Clear the page's local storage and the browser's log; set the size of a desktop window."""
    set_size(driver, DESKTOP)
    driver.get(url)
    driver.execute_script("localStorage.clear(); sessionStorage.clear();")
    driver.get_log("browser")


class Looks:
    """A page that is open in the browser."""

    def __init__(self, driver):
        self.driver = driver

    def one(self, css: str):
        return self.driver.find_element("css selector", css)

    def all(self, css: str) -> list:
        return self.driver.find_elements("css selector", css)

    def wait(self, condition):
        until(condition, "what the page is to show")


class Page(Looks):
    """The chat page, with the actions of a user."""

    def __init__(self, driver, url: str):
        super().__init__(driver)
        driver.get(url)
        self.wait(lambda: self.one("#send").is_enabled())

    def ask(self, text: str) -> None:
        """Write a message and press Enter."""
        self.one("#prompt").send_keys(text, "\ue007")

    def set(self, field: str, value) -> None:
        """Set a setting's value, with the events of a user's input."""
        self.driver.execute_script("const e = document.getElementById(arguments[0]); e.value = arguments[1];"
                                   "e.dispatchEvent(new Event('input'));", field, str(value))

    @property
    def busy(self) -> bool:
        return self.one("#send").get_attribute("aria-label") == "Stop"

    def texts(self) -> list[str]:
        return [element.get_property("textContent") for element in self.all(".reply .text")]
