"""The chat page in a real browser: Markdown and formulas, branches, other words, files of conversations, facts on the
service, and its use by keys, by ear, at any width and in the dark."""

import json
import random
import re

import pytest

from tests.server.browsing import DESKTOP, PHONE, Page, chromium, forget, set_size

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("downloads")
    with chromium() as driver:
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
        driver.downloads = folder
        yield driver


@pytest.fixture
def page(one_browser, server):
    forget(one_browser, server.url)
    page = Page(one_browser, server.url)
    page.set("temperature", 0)
    page.set("max_tokens", 6)
    yield page
    assert one_browser.get_log("browser") == []


def answered(page, text: str, count: int = 1) -> None:
    page.ask(text)
    page.wait(lambda: len(page.texts()) == count and not page.busy and page.all(".reply:last-child .foot button"))


def shown(page, text: str) -> None:
    """Put a stored conversation into the page whose answer has this text."""
    page.driver.execute_script("""
        localStorage.setItem("numflow.chat.x", JSON.stringify({ time: 1, turns: [
            { role: "user", content: "?" }, { role: "assistant", how: "complete", content: arguments[0] }] }));
        visit("x");""", text)


MARKDOWN = r"""# Title with `code`

A **strong *inner* word**, ~~gone~~ and 2 * 3 * 4 with snake_case_name,
a line of its own and [a link](https://example.org/a_b).

- one
- two
  1. inner
  2. more

  still two

> quoted
> **text**

| a | b |
|:--|--:|
| 1 | `x|y` |

```js
const a = "<b>";
```
---
Costs $5 and $6, but $x_1^2$ and \(\frac{a}{b}\):

$$\sum_{i=1}^n \sqrt{x_i} \unknown \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$$
"""


def test_markdown_and_formulas(page):
    shown(page, MARKDOWN)
    page.wait(lambda: page.all(".reply math"))
    outline = page.driver.execute_script("""
        const walk = e => e.nodeType === 3 ? e.data : e.classList.contains("t") ? e.textContent
            : `<${e.localName}>${[...e.childNodes].map(walk).join("")}</${e.localName}>`;
        return [...document.querySelector(".reply .text").childNodes].map(walk);""")
    assert outline[:4] == [
        "<h2>Title with <code>code</code></h2>",
        "<p>A <strong>strong <em>inner</em> word</strong>, <del>gone</del> and 2 * 3 * 4 with snake_case_name,\n"
        "a line of its own and <a>a link</a>.</p>",
        "<ul><li>one</li><li>two<ol><li>inner</li><li>more</li></ol>still two</li></ul>",
        "<blockquote><p>quoted\n<strong>text</strong></p></blockquote>"]
    assert outline[4] == ("<div><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>x|y</code></td></tr>"
                          "</table></div>")
    assert 'const a = "<b>";' in outline[5] and outline[6] == "<hr></hr>"
    assert outline[7].startswith("<p>Costs $5 and $6, but <span><math>") and outline[7].count("<math>") == 2
    assert "<mfrac><mi>a</mi><mi>b</mi></mfrac>" in outline[7]
    assert "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>" in outline[7]
    assert "<munderover>" in outline[8] and outline[8].count("<mtd>") == 4 and "<mtext>\\unknown</mtext>" in outline[8]
    link = page.one(".reply a")
    assert link.get_attribute("href") == "https://example.org/a_b" and "noopener" in link.get_attribute("rel")


@pytest.mark.parametrize("text", [
    "<img src=x onerror=window.bad=1><script>window.bad=1</script>", "[a](javascript:window.bad=1)",
    "```<b>\n<script>window.bad=1</script>\n```", "$<img src=x onerror=window.bad=1>$ | <b> |\n|--|--|\n| <i> | <u> |"])
def test_text_never_becomes_html(page, text):
    page.driver.execute_script("""
        localStorage.setItem("numflow.chat.x", JSON.stringify({ time: 1, title: arguments[0], turns: [
            { role: "user", content: arguments[0], files: [{ name: arguments[0], text: "x" }] },
            { role: "assistant", content: arguments[0], thinking: arguments[0], how: arguments[0] }] }));
        visit("x");""", text)
    assert page.driver.execute_script("return window.bad") is None
    assert page.all(".turn img, .turn script, .turn b, .turn i, .turn u, .turn a, #chats img") == []
    refused = page.driver.execute_script("try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; }")
    assert refused == "TypeError"  # Trusted Types: text cannot become HTML by mistake
    page.driver.get_log("browser")


def test_any_text_is_drawn(page):
    """Prefixes of a text with every kind of markup, as in a streamed answer, and random markup."""
    signs = ["*", "`", "$", "|", "\n", " ", "- ", "1. ", "> ", "#", "\\(", "\\)", "{", "}", "\\frac", "^", "_", "[",
             "~~~", "](https://b)", "a", "\\left(", "\\begin{cases}", "&", "---", "\\[", "\\text", "  "]
    draw = random.Random(7)
    texts = ["".join(draw.choices(signs, k=draw.randrange(1, 40))) for _ in range(300)]
    texts += [MARKDOWN[:end] for end in range(0, len(MARKDOWN), 3)]
    shown = page.driver.execute_script("""
        const box = new Reply("m");
        return arguments[0].map(text => {
            box.text = text; box.tokens = [{ end: text.length, entries: [] }]; box.paint(true);
            return box.body.textContent;
        });""", texts)
    drops = re.compile(r"```|~~~|[|]|[\\](frac|begin)")  # not drawn: languages of code, surplus cells, commands
    lost = [text for text, found in zip(texts[:300], shown) if not drops.search(text)
            and text.replace("https", "").count("a") != found.count("a")]
    assert lost == []


def test_messages_have_versions(page):
    answered(page, "one")
    first = page.texts()
    page.driver.execute_script("document.querySelector('.user .tools button').click()")
    page.one(".user textarea").clear()
    page.one(".user textarea").send_keys("other", "\ue007")
    page.wait(lambda: page.all(".user .versions") and not page.busy and page.all(".reply .foot button"))
    assert [b.text for b in page.all(".user .bubble")] == ["other"]
    assert "2/2" in page.one(".user .versions").text
    page.one(".user .versions button").click()
    assert [b.text for b in page.all(".user .bubble")] == ["one"] and page.texts() == first
    page.driver.execute_script("document.querySelectorAll('.reply .foot button')[1].click()")  # again
    page.wait(lambda: page.all(".reply .versions") and not page.busy)
    assert "2/2" in page.one(".reply .versions").text
    page = Page(page.driver, page.driver.current_url)  # after a reload: branches are kept
    assert "2/2" in page.one(".reply .versions").text and "1/2" in page.one(".user .versions").text
    assert len(page.all("#chats .open")) == 1


def test_conversations_are_renamed_and_exported(page):
    answered(page, "first question")
    page.set("system", "Be brief.")
    page.one("#chats .act[aria-label^=Rename]").click()
    field = page.one("#chats input")
    field.clear()
    field.send_keys("My name\ue007")
    page.wait(lambda: [b.text for b in page.all("#chats .open")] == ["My name"])
    page.one("#chats .act[aria-label='Export My name']").click()
    page.wait(lambda: list(page.driver.downloads.glob("*.json")))
    from numflow.cli.transcript import read_conversation

    file = page.driver.downloads / "My name.json"
    assert read_conversation(file) == ("Be brief.", [("first question", page.texts()[0])])
    assert json.loads(file.read_text())["messages"][0]["role"] == "system"


def test_an_answer_goes_on_from_another_word_by_keys(page, http):
    page.set("alternatives", 4)
    answered(page, "hi")
    before = page.texts()[0]
    page.driver.execute_script("window.own = fetch; window.fetch = (path, options) => {"
                               "if (options.body) window.sent = options.body; return own(path, options); }")
    text = page.one(".reply .text")
    assert text.get_attribute("tabindex") == "0" and "Enter" in text.get_attribute("aria-label")
    text.send_keys("\ue014")
    page.wait(lambda: page.all(".t.on"))
    text.send_keys("\ue014")
    page.wait(lambda: page.driver.execute_script("return document.querySelector('.t.on')?.dataset.n") == "1")
    assert "%" in page.one("#say").get_property("textContent")
    text.send_keys("\ue007")
    page.wait(lambda: page.all("#tip.held"))
    rows = page.all("#tip .row")
    assert not rows[0].is_enabled() and rows[1] == page.driver.switch_to.active_element
    assert "go on from here" in rows[1].get_attribute("aria-label")
    other = rows[1].find_element("css selector", "code").get_property("textContent")
    rows[1].send_keys("\ue007")
    page.wait(lambda: page.all(".reply .versions") and not page.busy)
    assert page.texts()[0].startswith(before[0] + other) and "2/2" in page.one(".reply .versions").text
    sent = json.loads(page.driver.execute_script("return window.sent"))
    assert sent["messages"][-1] == {"role": "assistant", "content": before[0] + other}
    reply = http.post("/v1/chat/completions", json={**sent, "stream": False}).json()["choices"][0]
    assert page.texts()[0] == before[0] + other + reply["message"]["content"]


def test_models_and_the_service_are_told(page):
    page.wait(lambda: len(page.all("#models li")) == 4)
    told = {row.text.split("\n")[0]: row.text for row in page.all("#models li")}
    assert "talks" in told["org/chat"] and "tokens" in told["org/chat"] and "parameters" in told["org/chat"]
    assert "not loaded" in told["encoder"] or "embeds" in told["encoder"]
    page.wait(lambda: "tokens/s" in page.one("#service").text)
    service = page.one("#service").text
    assert re.search(r"0 running, 0 waiting", service) and "Keys and values" in service and "Weights" in service


NAMES = """return [...document.querySelectorAll("button, input, select, textarea, [role=log], aside, article, dialog")]
    .filter(e => e.checkVisibility() || e.closest("aside"))
    .filter(e => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()) && e.type !== "file")
    .map(e => e.outerHTML);"""
CONTRAST = """
    const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                         return .2126 * r + .7152 * g + .0722 * b; };
    const parts = c => c.match(/[\\d.]+/g).map(Number);
    const ground = e => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
                          if (c.length < 4 || c[3] > .99) return c; } };
    return [...document.querySelectorAll("body *")].filter(e => e.checkVisibility({ opacityProperty: true })
        && !e.disabled && e.localName !== "option" && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
      .map(e => { const [a, b] = [parts(getComputedStyle(e).color), ground(e)].map(c => light(c.slice(0, 3)));
                  return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.className, e.textContent.slice(0, 30)]; })
      .filter(([ratio]) => ratio < 4.5);"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_can_be_read_and_heard(page, size, dark):
    set_size(page.driver, size, dark)
    shown(page, MARKDOWN)
    page.wait(lambda: page.all(".reply math"))
    assert page.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert page.driver.execute_script(NAMES) == []
    assert page.driver.execute_script(CONTRAST) == []
    if size == PHONE:
        page.one("#gear").click()
        page.wait(lambda: page.one("#temperature").is_displayed())
        assert page.one("#main").get_property("inert") and page.driver.execute_script(CONTRAST) == []
        page.driver.switch_to.active_element.send_keys("\ue00c")
        page.wait(lambda: not page.one("#main").get_property("inert"))


def test_answers_are_heard_and_focus_follows_the_order_of_the_page(page):
    answered(page, "hi")
    said = page.one("#say")
    assert said.get_attribute("aria-live") == "polite"
    page.wait(lambda: said.get_property("textContent") == f"Answer: {page.texts()[0]}")
    assert page.one("#log").get_attribute("aria-live") == "off"  # not token by token
    seen = page.driver.execute_script("""
        return [...document.querySelectorAll("button, select, textarea, [tabindex='0']")]
            .filter(e => e.checkVisibility()).map(e => e.id || e.closest("article, aside, form")?.localName);""")
    places = [seen.index(name) for name in ("model", "new", "article", "attach", "prompt", "send", "system")]
    assert places == sorted(places)
