"""The chat page in a real browser, headless: streaming, stopping, settings, alternatives, keyboard, phone width."""

import re
import shutil

import pytest

from numflow.server.app import PAGE
from tests.waiting import until

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def test_the_page_asks_nothing_of_others(http):
    reply = http.get("/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    links = re.findall(r"""(?:https?:)?//[\w.-]+|@import|url\(""", PAGE.read_text(encoding="utf-8"))
    assert [link for link in links if link != "http://www.w3.org"] == []  # the namespace of the drawings


@pytest.fixture
def browser():
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
    yield driver
    driver.quit()


class Page:
    """The page as a user works with it."""

    def __init__(self, driver, url: str):
        self.driver = driver
        driver.get(url)
        self.wait(lambda: self.one("#send").is_enabled())

    def one(self, css: str):
        return self.driver.find_element("css selector", css)

    def all(self, css: str) -> list:
        return self.driver.find_elements("css selector", css)

    def wait(self, condition):
        until(condition, "what the page is to show")

    def ask(self, text: str) -> None:
        """Write a message and press Enter."""
        self.one("#prompt").send_keys(text, "\ue007")

    def set(self, field: str, value) -> None:
        """Give a setting a value, as input does."""
        self.driver.execute_script("const e = document.getElementById(arguments[0]); e.value = arguments[1];"
                                   "e.dispatchEvent(new Event('input'));", field, str(value))

    @property
    def busy(self) -> bool:
        return self.one("#send").get_attribute("aria-label") == "Stop"

    def texts(self) -> list[str]:
        return [element.get_property("textContent") for element in self.all(".reply .text")]


@pytest.mark.slow
def test_a_conversation(browser, server, model):
    page = Page(browser, server.url)
    assert [option.text for option in page.all("#model option")][:2] == ["org/chat", "encoder"]
    page.set("temperature", 0)
    page.set("max_tokens", 24)
    page.ask("hi")
    page.wait(lambda: page.all(".reply") and not page.busy)
    expected = model.generate([{"role": "user", "content": "hi"}], chat=True, max_tokens=24, temperature=0).text
    assert page.texts() == [expected]
    shown = r"24 tokens.*[\d.]+ tokens/s.*first after [\d.]+ s.*cut at the limit"
    assert re.search(shown, page.one(".foot").text, re.S)

    tokens = page.all(".t[data-n]")
    assert len(tokens) == 24
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(tokens[3]).perform()
    rows = [row.text.split("\n") for row in page.all("#tip .row")]
    assert len(rows) == 5 and rows[0][0] == expected[3] and float(rows[0][1].split()[0]) > float(rows[4][1].split()[0])

    page.ask("again\ue008\ue007\ue008and more")  # Shift+Enter starts a line
    page.wait(lambda: len(page.texts()) == 2 and not page.busy)
    assert page.all(".user .bubble")[1].text == "again\nand more"
    assert browser.get_log("browser") == []
    page.one("#new").click()
    assert page.texts() == [] and "talk about" in page.one("#empty").text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping(browser, server, how):
    page = Page(browser, server.url)
    page.set("max_tokens", 470)
    before = server.wait_idle()["cancelled"]
    page.ask("hi")
    page.wait(lambda: page.busy and page.texts() and page.texts()[0])
    if how == "button":
        page.one("#send").click()
    else:
        page.one("body").send_keys("\ue00c")
    page.wait(lambda: not page.busy)
    assert "stopped" in page.one(".foot").text and len(page.texts()[0]) < 470
    assert server.wait_idle()["cancelled"] == before + 1


@pytest.mark.slow
def test_an_error_is_shown(browser, server):
    page = Page(browser, server.url)
    page.set("model", "encoder")
    page.ask("hi")
    page.wait(lambda: page.all(".foot .error"))
    assert "does not write text" in page.one(".foot .error").text


@pytest.mark.slow
def test_a_phone(browser, server):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True})
    page = Page(browser, server.url)
    page.set("max_tokens", 40)
    page.ask("hi " * 30)
    page.wait(lambda: page.all(".reply") and not page.busy)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert not page.one("#temperature").is_displayed()
    page.one("#gear").click()
    page.wait(lambda: page.one("#temperature").is_displayed())
    page.one("#done").click()
    page.wait(lambda: not page.one("#temperature").is_displayed())


@pytest.mark.slow
def test_settings_are_kept(browser, server):
    page = Page(browser, server.url)
    page.set("system", "Be brief.")
    page.set("temperature", 1.5)
    page = Page(browser, server.url)
    assert page.one("#system").get_property("value") == "Be brief."
    assert page.one("#temperature").get_property("value") == "1.5"
