"""Pictures in docs/: the chat page at desktop and phone width, light and dark, the page that looks inside the engine,
and a recording of the terminal. A real model answers; pauses of over half a second are shortened.

    python -m tests.draw_chat MODEL        (chromium, chromedriver, pillow)
"""

import io
import sys
import tempfile
from html import escape
from itertools import pairwise

from tests.cli.typist import COLUMNS, LINES, Typist
from tests.conftest import REPO
from tests.server.browsing import DESKTOP, PHONE, Looks, Page, chromium, set_size
from tests.server.processes import ServerProcess

DOCS = REPO / "docs"
QUESTION = "Write a short Python function that reverses a string, and explain it in a list of two points."
PAUSE, LAST, FRAME = 0.5, 4.0, 0.08  # seconds at most between two frames, of the last one, and at least
CELL, ROW, MARGIN = 8.4, 18, 12  # pixels
COLOURS = {"default": "#d8dee9", "black": "#4c566a", "red": "#bf616a", "green": "#a3be8c", "brown": "#ebcb8b",
           "blue": "#81a1c1", "magenta": "#b48ead", "cyan": "#88c0d0", "white": "#eceff4", "brightblack": "#7b88a1",
           "brightred": "#d0737c", "brightgreen": "#b1cf99", "brightbrown": "#f0d79d", "brightblue": "#93b3d3",
           "brightmagenta": "#c49bc0", "brightcyan": "#9ad3e0", "brightwhite": "#ffffff"}


def save(driver, name: str) -> None:
    """A picture of the window, in 128 colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)


def pages(model: str) -> None:
    """Pictures of both pages."""
    with ServerProcess("-m", model) as server, chromium() as driver:
        set_size(driver, DESKTOP)
        page = Page(driver, server.url)
        page.set("temperature", 0)
        page.set("max_tokens", 160)
        page.ask(QUESTION)
        page.wait(lambda: page.all(".reply .foot button") and not page.busy)
        page.wait(lambda: "0 running" in page.one("#service").text)
        driver.execute_script("""
            const word = [...document.querySelectorAll(".t[data-n]")].find(w => w.textContent.length > 4);
            word.dispatchEvent(new MouseEvent("click", { bubbles: true }));""")
        save(driver, "chat-page.png")
        driver.execute_script("tip(null)")
        set_size(driver, DESKTOP, dark=True)
        save(driver, "chat-page-dark.png")
        set_size(driver, PHONE, dark=True)
        driver.execute_script("document.getElementById('log').scrollTop = 0")
        page.wait(lambda: not page.one("#settings").is_displayed())
        save(driver, "chat-page-phone.png")
        set_size(driver, DESKTOP)
        driver.get(f"{server.url}/explore#quantisation")
        look = Looks(driver)
        look.wait(lambda: look.all("#pairs .bits"))
        save(driver, "explore.png")


def recording(model: str) -> None:
    """The terminal, as an SVG that moves."""
    frames: list[tuple[float, list[str]]] = []
    with tempfile.TemporaryDirectory() as home:
        typist = Typist("-m", "numflow", "chat", "-m", model, "--temperature", "0", "-n", "160", NUMFLOW_HOME=home)

        def until(seen) -> None:
            while not seen(typist.screen):
                if typist.read(60) and (not frames or typist.times[-1][0] - frames[-1][0] >= FRAME):
                    frames.append((typist.times[-1][0], rows(typist)))

        def write(text: str) -> None:
            for letter in text:
                seen = len(typist.times)
                typist.type(letter.encode())
                until(lambda rows, seen=seen: len(typist.times) > seen)
            typist.type(b"\r")

        waits = lambda rows: rows[-1:] == [">"]  # noqa: E731
        until(waits)
        write(QUESTION)
        until(lambda rows: not waits(rows) and rows[-1:] != [f"> {QUESTION}"])
        until(waits)
        write("/stats")
        until(lambda rows: any("turns" in row for row in rows) and waits(rows))
        frames.append((typist.times[-1][0], rows(typist)))
        typist.close()
    (DOCS / "chat.svg").write_text(drawing(frames), encoding="utf-8")


def rows(typist: Typist) -> list[str]:
    """Each row of the screen as SVG text, "" where it is empty."""
    found = []
    for cells in typist.cells:
        parts, at = [], 0
        while at < COLUMNS:
            end, look = at, (cells[at].fg, cells[at].bold)
            while end < COLUMNS and (cells[end].fg, cells[end].bold) == look:
                end += 1
            text = "".join(cell.data for cell in cells[at:end])
            at += len(text) - len(text.lstrip())
            if text.strip():
                colour = COLOURS.get(look[0], f"#{look[0]}")
                bold = ' font-weight="700"' if look[1] else ""
                place = f'x="{MARGIN + at * CELL:.1f}" fill="{colour}"{bold}'
                parts.append(f"<tspan {place}>{escape(text.strip())}</tspan>")
            at = end
        found.append("".join(parts))
    return found


def drawing(frames: list[tuple[float, list[str]]]) -> str:
    """An SVG in which every row is shown as long as it stands on the screen, again and again."""
    starts = [0.0]
    for (before, _), (now, _) in pairwise(frames):
        starts.append(starts[-1] + min(PAUSE, now - before))
    whole = starts[-1] + LAST
    parts = []
    for line in range(LINES):
        first = 0
        for at in range(1, len(frames) + 1):
            if at < len(frames) and frames[at][1][line] == frames[first][1][line]:
                continue
            text, end = frames[first][1][line], whole if at == len(frames) else starts[at]
            if text:
                parts.append(f'<text y="{MARGIN + ROW * (line + 1) - 5}" visibility="hidden">{text}<set '
                             f'attributeName="visibility" to="visible" begin="c.begin+{starts[first]:.2f}s" '
                             f'dur="{end - starts[first]:.2f}s"/></text>')
            first = at
    width, height = COLUMNS * CELL + 2 * MARGIN, LINES * ROW + 2 * MARGIN
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-size="14"
     xml:space="preserve" font-family="ui-monospace, Menlo, Consolas, Liberation Mono, monospace">
<title>numflow chat in a terminal</title>
<rect width="{width:.0f}" height="{height}" rx="8" fill="#242933">
<animate id="c" attributeName="x" from="0" to="0" begin="0s;c.end" dur="{whole:.2f}s"/></rect>
{chr(10).join(parts)}
</svg>
"""


if __name__ == "__main__":
    for draw in (recording, pages):
        draw(sys.argv[1])
