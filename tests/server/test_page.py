"""The chat page in a real browser, headless: streaming, stopping, settings, alternatives, keyboard, phone width."""

import json
import re

import pytest

from tests.server.browsing import PHONE, Page, chromium, forget, set_size


def test_the_page_asks_nothing_of_others(http):
    reply = http.get("/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    links = re.findall(r"""(?:https?:)?//[\w.-]+|@import|url\(|<script src|<link rel="style""", reply.text)
    assert [link for link in links if link != "http://www.w3.org"] == []  # namespaces of SVG and MathML
    assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy  # text cannot become HTML


@pytest.fixture(scope="module")
def one_browser():
    with chromium() as driver:
        yield driver


@pytest.fixture
def browser(one_browser, server):
    """The chat page in a browser with empty storage."""
    forget(one_browser, server.url)
    one_browser.get("about:blank")
    yield one_browser


@pytest.mark.slow
def test_a_conversation(browser, server, model):
    page = Page(browser, server.url)
    assert [option.text for option in page.all("#model option")] == ["org/chat", "limited"]  # encoders do not chat
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
    page.set("max_tokens", -5)
    page.ask("hi")
    page.wait(lambda: page.all(".foot .error"))
    assert "max_tokens" in page.one(".foot .error").text


@pytest.mark.slow
def test_a_phone(browser, server):
    set_size(browser, PHONE)
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


@pytest.mark.slow
def test_conversations_are_kept_listed_and_deleted(browser, server):
    page = Page(browser, server.url)
    page.set("max_tokens", 5)
    page.ask("first question")
    page.wait(lambda: page.texts() and not page.busy)
    first = page.texts()
    page = Page(browser, server.url)  # reloaded
    assert page.texts() == first and [b.text for b in page.all(".user .bubble")] == ["first question"]
    page.one("#new").click()
    page.ask("second question")
    page.wait(lambda: page.texts() and not page.busy)
    assert [b.text for b in page.all("#chats .open")] == ["second question", "first question"]
    page.all("#chats .open")[1].click()
    assert page.texts() == first
    page.ask("and more")
    page.wait(lambda: len(page.texts()) == 2 and not page.busy)
    assert [b.text for b in page.all("#chats .open")] == ["first question", "second question"]
    page.all("#chats .drop")[1].click()
    assert len(page.all("#chats .open")) == 2  # the deletion is confirmed by a second click
    page.all("#chats .drop")[1].click()
    page = Page(browser, server.url)
    assert [b.text for b in page.all("#chats .open")] == ["first question"] and len(page.texts()) == 2
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_an_answer_goes_to_its_own_conversation(browser, server):
    page = Page(browser, server.url)
    page.set("max_tokens", 470)
    page.ask("long")
    page.wait(lambda: page.busy and page.texts() and page.texts()[0])
    page.one("#new").click()
    assert not page.busy and page.texts() == []
    server.wait_idle()
    assert page.texts() == []
    page.one("#chats .open").click()
    assert page.texts()[0] and "interrupted" in page.one(".foot").text


@pytest.mark.slow
def test_a_message_is_written_anew(browser, server, model):
    page = Page(browser, server.url)
    page.set("temperature", 0)
    page.set("max_tokens", 8)
    for text in ("one", "two"):
        page.ask(text)
        page.wait(lambda: page.texts() and not page.busy)
    page.driver.execute_script("document.querySelector('.user .tools button').click()")
    area = page.one(".user textarea")
    area.clear()
    area.send_keys("three", "\ue007")
    page.wait(lambda: len(page.texts()) == 1 and not page.busy)
    assert [b.text for b in page.all(".user .bubble")] == ["three"]
    expected = model.generate([{"role": "user", "content": "three"}], chat=True, max_tokens=8, temperature=0).text
    assert page.texts() == [expected]


@pytest.mark.slow
def test_a_text_file_goes_with_the_message(browser, server, tmp_path):
    (tmp_path / "notes.md").write_text("a\n```\nb\n```\n")
    (tmp_path / "raw.bin").write_bytes(b"\xff\xfe\x00")
    page = Page(browser, server.url)
    page.set("max_tokens", 3)
    page.one("#file").send_keys(f"{tmp_path / 'notes.md'}\n{tmp_path / 'raw.bin'}")
    page.wait(lambda: page.one("#note").text)
    assert page.one("#note").text == "raw.bin is not UTF-8 text"
    assert [chip.text.split(",")[0] for chip in page.all("#files .chip")] == ["notes.md"]
    browser.execute_script("const own = fetch; window.fetch = (path, options) => {"
                           "window.sent = options.body; return own(path, options); }")
    page.ask("Sum up:")
    page.wait(lambda: page.texts() and not page.busy)
    sent = json.loads(browser.execute_script("return window.sent"))
    assert sent["messages"][0]["content"] == "Sum up:\n\nnotes.md:\n````\na\n```\nb\n```\n````"
    assert page.one(".user .bubble").text == "Sum up:" and "notes.md" in page.one(".user .chip").text
    assert page.all("#files .chip") == []


@pytest.mark.slow
def test_code_has_a_copy_button_of_its_own(browser, server):
    page = Page(browser, server.url)
    browser.execute_script("""
        localStorage.setItem("numflow.chat.x", JSON.stringify({ time: 1, turns: [
            { role: "user", content: "code?" },
            { role: "assistant", how: "complete",
              content: "Here:\\n```python\\nprint(1)\\nprint(2)\\n```\\nDone" }] }));
        sessionStorage.setItem("numflow.last", "x");""")
    page = Page(browser, server.url)
    browser.execute_script("document.execCommand = () => { window.copied = document.activeElement.value; };"
                           "navigator.clipboard.writeText = () => Promise.reject();")
    browser.execute_script("document.querySelector('.code button').click()")
    page.wait(lambda: page.one(".code button").get_property("textContent") == "copied")
    assert browser.execute_script("return window.copied") == "print(1)\nprint(2)"


@pytest.mark.slow
def test_a_finger_shows_alternatives(browser, server):
    set_size(browser, PHONE)
    page = Page(browser, server.url)
    page.set("temperature", 0)  # the likeliest token is among the five alternatives
    page.set("max_tokens", 8)
    page.ask("hi")
    page.wait(lambda: page.texts() and not page.busy)

    def tapped() -> bool:  # repeated if the log scrolled after the tap, which hides the alternatives
        browser.execute_script("""
            const word = document.querySelectorAll(".t[data-n]")[2], finger = { bubbles: true, pointerType: "touch" };
            for (const kind of ["pointerover", "pointerdown", "pointerup"])
                word.dispatchEvent(new PointerEvent(kind, finger));
            document.getElementById("log").dispatchEvent(new PointerEvent("pointerleave", finger));""")
        return page.one("#tip").is_displayed() and len(page.all("#tip .row")) == 5

    page.wait(tapped)
    assert "Tap a word" in page.one("#hint").get_property("textContent")
