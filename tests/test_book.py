"""The book (docs/book): blocks of Python run, drawings are those of the script, and the index leads to answers."""

import importlib.util
import re

import pytest

from tests.conftest import REPO

BOOK = REPO / "docs" / "book"
CHAPTERS = sorted(path for path in BOOK.glob("[0-9]*.md"))
# Questions that a reader comes with, and words of their answers.
ANSWERS = {"06-bits": ("11^2 = 121 <= 2^7", "planes"), "01-walk": ("residual stream", "logits"),
           "03-memory": ("block table", "copy on write"), "04-limits": ("bandwidth", "memory-bound"),
           "05-kernels": ("vpdpbusd", "VNNI"), "08-devices": ("row-parallel", "all_reduce"),
           "02-data": ("spec", "steps"), "09-choosing": ("min(1, p", "draft")}


def drawings():
    spec = importlib.util.spec_from_file_location("book_drawings", BOOK / "figures" / "drawings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DRAWINGS


DRAWINGS = drawings()


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
@pytest.mark.thin(3)
def test_the_blocks_of_a_chapter_run(chapter, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NUMFLOW_HOME", str(tmp_path))
    found = {"__name__": "book"}
    text = chapter.read_text(encoding="utf-8")
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)):
        exec(compile(code, f"{chapter.name}, block {number}", "exec"), found)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_whole(chapter):
    text = chapter.read_text(encoding="utf-8")
    assert re.search(r"!\[[^\]]+\]\(figures/\w+\.svg\)", text) and "```python" in text and "**Lab" in text
    assert text.count("<details><summary>") == text.count("</details>") == 3
    assert [line for line in text.splitlines() if len(line) > 240] == []


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing(name):
    made = DRAWINGS[name]()
    for at, (x0, y0, x1, y1, words) in enumerate(made.texts):
        assert x0 >= 0 and y0 >= 0 and x1 <= made.width and y1 <= made.height, f"{words!r} leaves the canvas"
        for a0, b0, a1, b1, others in made.texts[at + 1:]:
            covered = max(0, min(x1, a1) - max(x0, a0)) * max(0, min(y1, b1) - max(y0, b0))
            assert covered <= 4, f"{words!r} covers {others!r}"
    assert (BOOK / "figures" / f"{name}.svg").read_text(encoding="utf-8") == made.svg(), "drawn anew: drawings.py"


def test_figures_are_used_and_there():
    used = {name for chapter in CHAPTERS for name in re.findall(r"\(figures/(\w+)\.svg\)",
                                                                chapter.read_text(encoding="utf-8"))}
    assert used == {path.stem for path in (BOOK / "figures").glob("*.svg")}


@pytest.mark.parametrize("chapter", ANSWERS)
def test_questions_are_two_hops_away(chapter):
    index = (REPO / "docs" / "README.md").read_text(encoding="utf-8")
    assert f"(book/{chapter}.md)" in index
    text = (BOOK / f"{chapter}.md").read_text(encoding="utf-8")
    assert all(word in text for word in ANSWERS[chapter]) and "(figures/" in text


def near(page, hops):
    """Pages that links lead to from a page, in so many steps at most."""
    found = {page}
    for _ in range(hops):
        links = {(one.parent / link).resolve() for one in found
                 for link in re.findall(r"\]\(([^)#\s]+\.md)", one.read_text(encoding="utf-8")) if ":" not in link}
        found |= {link for link in links if link.is_file()}
    return found


def test_who_wonders_finds_eight_answers_with_drawings():
    index = REPO / "docs" / "README.md"
    asked = re.findall(r"^\| ((?:how|what|why) .+?) \| \[[^\]]+\]\((book/.+?)\) \|$", index.read_text("utf-8"), re.M)
    assert len(asked) == len(ANSWERS) == 8
    assert {page for _, page in asked} == {f"book/{chapter}.md" for chapter in ANSWERS}
    reached = near(index, 2)
    for _, page in asked:
        path = (index.parent / page).resolve()
        pictures = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", path.read_text(encoding="utf-8"))
        assert path in reached and pictures and all((path.parent / picture).is_file() for picture in pictures), page


def test_words_of_the_glossary_are_explained_where_it_says():
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \| \[[^\]]*\]\(([^)]+)\) \|$", (BOOK / "glossary.md").read_text("utf-8"),
                      re.M)
    assert len(rows) > 30
    for words, page in rows:
        text = (BOOK / page).read_text(encoding="utf-8").lower()
        for word in re.sub(r"\([^)]*\)", "", words).split(","):
            assert word.strip().lower() in text, f"{word} is not in {page}"
