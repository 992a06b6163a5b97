"""docs/rooms.svg: packages by level and their rooms in the order of imports, drawn from the tables that tests hold.

    python -m tests.draw_rooms
"""

from xml.sax.saxutils import escape

from tests.conftest import REPO
from tests.test_layers import levels
from tests.test_rooms import rooms

TARGET = REPO / "docs/rooms.svg"
WIDTH, MARGIN, GAP, ROW, CHARACTER = 1000, 12, 8, 24, 7.6  # pixels
LABEL = 24  # of a level


def boxes() -> list[list[tuple[str, list[str]]]]:
    """Levels from the highest down: packages and modules with the names of their rooms, the last importer first."""
    table, inside = levels(), {}
    for room in reversed(rooms()):
        package, _, name = room.rstrip("/").partition("/")
        if name:
            inside.setdefault(package, []).append(name)
    return [[(name, inside.get(name, [])) for name in table if table[name] == level]
            for level in sorted(set(table.values()), reverse=True)]


def drawing() -> str:
    """The SVG text."""
    parts, y = [], MARGIN
    for level, packages in zip(sorted(set(levels().values()), reverse=True), boxes()):
        begin, x, tallest = y, MARGIN + LABEL, 0
        wide = [item for item in packages if item[1]]
        for name in [name for name, inside in packages if not inside]:
            width = len(name) * CHARACTER + 16
            if x + width > WIDTH - MARGIN:
                x, y = MARGIN + LABEL, y + ROW + GAP
            parts += _box(x, y, width, ROW, name, "package")
            x, tallest = x + width + GAP, ROW + GAP
        y += tallest
        for name, inside in wide:
            inner, line = _rooms(inside, y + ROW)
            height = line - y + GAP
            parts += _box(MARGIN + LABEL, y, WIDTH - 2 * MARGIN - LABEL, height, name, "package", top=True)
            parts += inner
            y += height + GAP
        parts.append(f'<text class="level" x="{MARGIN}" y="{begin + 16}">{level}</text>')
        parts.append(f'<line x1="{MARGIN}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}"/>')
        y += GAP
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + ROW}" font-family="sans-serif" '
            'font-size="12" role="img"><title>Packages of numflow by level, and their rooms</title><style>'
            ".package{fill:#eef2f7;stroke:#5b6b7f}.room{fill:#fff;stroke:#8fa3b8}.level{fill:#5b6b7f;font-size:11px}"
            "line{stroke:#c8d2dd;stroke-dasharray:3 3}</style><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>")
    foot = (f'<text class="level" x="{MARGIN}" y="{y + 14}">A package imports from lower levels, a room of a '
            "package from rooms to its right.</text></svg>\n")
    return "\n".join([head, *parts, foot])


def _rooms(names: list[str], y: float) -> tuple[list[str], float]:
    """Boxes of rooms in lines, and where the last line ends."""
    parts, x = [], MARGIN + LABEL + GAP
    for name in names:
        width = len(name) * CHARACTER + 16
        if x + width > WIDTH - MARGIN - GAP:
            x, y = MARGIN + LABEL + GAP, y + ROW + GAP
        parts += _box(x, y, width, ROW, name, "room")
        x += width + GAP
    return parts, y + ROW


def _box(x: float, y: float, width: float, height: float, name: str, kind: str, top: bool = False) -> list[str]:
    across = "" if top else ' text-anchor="middle"'
    return [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>',
            f'<text x="{x + (8 if top else width / 2):g}" y="{y + 16:g}"{across}>{escape(name)}</text>']


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
    print(TARGET)
