"""Drawings of the book: boxes, arrows and words as SVG, made without any package.

    python docs/book/figures/drawings.py    all of them, beside this file
"""

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
BLUE, RED, SKY, GREEN, GREY = "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#888888"
CHARACTER, LINE = 6.7, 16  # of 12 pixels of a plain font, at most


class Drawing:
    """Parts of an SVG; `texts` has (x0, y0, x1, y1, words) of everything written."""

    def __init__(self, title: str, width: int, height: int):
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []
        self.texts: list[tuple[float, float, float, float, str]] = []
        self.text(10, 20, title, bold=True)

    def text(self, x: float, y: float, words: str, colour: str = "#222222", anchor: str = "start",
             bold: bool = False) -> None:
        wide = len(words) * CHARACTER * (1.08 if bold else 1)
        left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        self.texts.append((left, y - 11, left + wide, y + 3, words))
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(words)}'
                          "</text>")

    def box(self, x: float, y: float, width: float, height: float, words: str = "", colour: str = BLUE,
            fill: bool = False) -> None:
        opacity = "0.30" if fill else "0.10"
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}" '
                          f'fill-opacity="{opacity}" stroke="{colour}"/>')
        lines = words.split("\n") if words else []
        for at, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4 + LINE * (at - (len(lines) - 1) / 2), line, anchor="middle")

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str = "#555555") -> None:
        self.parts.append(f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{colour}" '
                          'marker-end="url(#a)"/>')

    def svg(self) -> str:
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" font-family="sans-serif" font-size="12">\n'
                f"<title>{escape(self.title)}</title>\n"
                '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path d="M0 0L8 4L0 8z" fill="#555555"/></marker></defs>\n'
                '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(self.parts) + "\n</svg>\n")


def one_layer() -> Drawing:
    """Shapes along a layer of `tiny`."""
    d = Drawing("One layer: attention reads other tokens, the feed-forward layer reads each token separately", 760, 250)
    steps = (("norm", "[T, 96]"), ("q, k, v", "[T, 160]"), ("rope", "[T, 128]"), ("attention", "[T, 96]"),
             ("output", "[T, 96]"))
    for at, (name, shape) in enumerate(steps):
        d.box(90 + 130 * at, 50, 100, 42, f"{name}\n{shape}")
        if at:
            d.arrow(60 + 130 * at, 71, 90 + 130 * at, 71)
    for at, (name, shape) in enumerate((("norm", "[T, 96]"), ("gate, up", "[T, 512]"), ("silu, times", "[T, 256]"),
                                        ("down", "[T, 96]"))):
        d.box(90 + 130 * at, 160, 100, 42, f"{name}\n{shape}", RED)
        if at:
            d.arrow(60 + 130 * at, 181, 90 + 130 * at, 181)
    d.text(10, 76, "x [T, 96]")
    d.text(10, 186, "x [T, 96]")
    d.arrow(660, 92, 660, 118)
    d.arrow(530, 202, 530, 228)
    d.text(652, 134, "added to x, the residual stream", anchor="end")
    d.text(522, 240, "added to x, the input of the next layer", anchor="end")
    return d


def model_as_data() -> Drawing:
    """From a text file to a program."""
    d = Drawing("A model is data: no code depends on its family", 760, 190)
    for x, words, colour in ((10, "spec\nTOML", GREEN), (10, "checkpoint\ntensors", GREEN)):
        d.box(x, 40 + 70 * (words[0] == "c"), 110, 46, words, colour)
    for at, words in enumerate(("Network\nsteps on buffers", "Plan\nsteps by device", "Program\nsteps bound to kernels",
                                "Engine\nrequests, batches")):
        x = 170 + 148 * at
        d.box(x, 75, 138, 46, words)
        d.arrow(x - 10 if at else 122, 98, x, 98)
    d.arrow(120, 63, 168, 88)
    d.arrow(120, 133, 168, 108)
    d.text(170, 160, "plain data, the same for every executor")
    d.text(466, 160, "reference, cpu, cuda, several devices")
    return d


def block_table() -> Drawing:
    """Two samples of one prompt, before and after one of them writes."""
    d = Drawing("Blocks are pages: samples share blocks until one sample writes (copy on write)", 760, 230)
    d.text(10, 60, "table of sample 1")
    d.text(10, 100, "table of sample 2")
    for row, blocks in enumerate(((7, 2, 5), (7, 2, 9))):
        for at, block in enumerate(blocks):
            d.box(140 + 50 * at, 44 + 40 * row, 44, 24, str(block), RED if block == 9 else BLUE)
    d.text(320, 60, "tokens 0-63, 64-127, 128-...")
    d.text(320, 100, "9 is a copy of 5, made when sample 2 wrote")
    d.text(10, 158, "memory")
    for block in range(10):
        used = {7: "2 references", 2: "2 references", 5: "", 9: ""}
        d.box(70 + 66 * block, 140, 60, 30, str(block), GREY if block not in used else RED if block == 9 else BLUE,
              block in used)
    d.text(70, 195, "blocks 7 and 2 have two references and are stored once; grey blocks are free or cached prefixes")
    return d


def pair_of_codes() -> Drawing:
    """The 7 bits of two codes, and their place in a unit."""
    d = Drawing("Two codes of 0..10 are one number 0..120 of 7 bits: 11 * second + first", 760, 250)
    d.box(20, 44, 120, 30, "first = 7")
    d.box(160, 44, 120, 30, "second = 4", RED)
    d.arrow(280, 59, 330, 59)
    d.text(340, 63, "11 * 4 + 7 = 51")
    for at, bit in enumerate("0110011"):
        d.box(460 + 34 * at, 44, 30, 30, bit, GREEN if at == 0 else SKY if at < 3 else BLUE, True)
    d.text(460, 96, "bit 6, bits 5 and 4, bits 3 to 0")
    d.text(20, 136, "a unit: 16 pairs, 32 weights, 14 bytes")
    for x, width, words, colour in ((20, 80, "2 bytes", GREEN), (100, 160, "4 bytes", SKY),
                                    (260, 320, "8 bytes", BLUE)):
        d.box(x, 150, width, 34, words, colour, True)
    d.text(20, 206, "bit 6 of all")
    d.text(108, 206, "bits 5, 4 of all 16")
    d.text(268, 206, "bits 3 to 0 of all 16")
    d.text(20, 236, "no bit is padding: 3.5 bits per weight, plus the header of the block")
    return d


def two_cuts() -> Drawing:
    """Column-parallel, then row-parallel: one sum for each pair of products."""
    d = Drawing("By tensor: the first matrix is split by rows, the second by columns; one sum completes it", 760, 270)
    for device, y in ((0, 50), (1, 160)):
        d.text(10, y + 44, f"device {device}")
        d.box(80, y + 15, 70, 50, "x\n[T, D]", GREY)
        d.box(190, y, 120, 80, f"gate, up\nrows of half\n{device}", RED if device else BLUE)
        d.box(350, y + 15, 80, 50, "[T, F/2]", RED if device else BLUE)
        d.box(470, y, 120, 80, f"down\ncolumns of\nhalf {device}", RED if device else BLUE)
        for x0, x1 in ((150, 190), (310, 350), (430, 470)):
            d.arrow(x0, y + 40, x1, y + 40)
        d.arrow(590, y + 40, 640, 145 - 12 * (1 - 2 * device))
    d.box(640, 115, 110, 60, "all_reduce\nsum, [T, D]", GREEN)
    d.text(80, 262, "no device needs the other device's intermediate values: nothing is sent between the two products")
    return d


def static_and_continuous() -> Drawing:
    """Five requests on two slots, batched in both ways."""
    d = Drawing("Static batching waits for the longest request; continuous batching fills free slots at once", 760, 230)
    lengths = (3, 9, 7, 2, 4)
    colours = (BLUE, RED, SKY, GREEN, GREY)
    unit = 24
    for row, (name, plan) in enumerate((("static", _static(lengths)), ("continuous", _continuous(lengths)))):
        top = 50 + 85 * row
        d.text(10, top + 24, name)
        for request, place, begin in plan:
            d.box(100 + unit * begin, top + 28 * place, unit * lengths[request] - 2, 24, str(request + 1),
                  colours[request], True)
        end = max(begin + lengths[request] for request, _, begin in plan)
        d.text(110 + unit * end, top + 30, f"{end} steps")
    d.text(100, 224, "five requests, two slots; width: tokens")
    return d


def _static(lengths):
    plan, begin = [], 0
    for first in range(0, len(lengths), 2):
        pair = list(range(first, min(first + 2, len(lengths))))
        plan += [(request, place, begin) for place, request in enumerate(pair)]
        begin += max(lengths[request] for request in pair)
    return plan


def _continuous(lengths):
    free, plan = [0, 0], []
    for request, length in enumerate(lengths):
        place = free.index(min(free))
        plan.append((request, place, free[place]))
        free[place] += length
    return plan


def register_tile() -> Drawing:
    """8 tokens times 16 rows, in registers."""
    d = Drawing("A tile: 16 rows of weights are decoded once for 8 tokens; the sums stay in registers", 760, 240)
    d.box(40, 60, 130, 120, "weights\n16 rows\n32 columns", BLUE)
    d.arrow(170, 120, 220, 120)
    d.box(220, 90, 130, 60, "bytes\nlane = row", BLUE, True)
    d.box(400, 44, 90, 24, "token 0", RED)
    for at in range(8):
        d.box(400, 44 + 22 * at, 90, 20, f"token {at}" if at else "", RED)
        d.box(540, 44 + 22 * at, 180, 20, f"16 sums of token {at}", GREEN)
        d.arrow(490, 54 + 22 * at, 540, 54 + 22 * at)
    d.arrow(350, 120, 400, 120)
    d.text(40, 236, "one VNNI instruction multiplies 64 bytes by 64 bytes and adds groups of four products to 16 sums")
    return d


def butterfly() -> Drawing:
    """Eight lanes compute a sum in three rounds."""
    d = Drawing("A warp sums without memory: lane i adds the value of lane i xor 4, then xor 2, then xor 1", 760, 220)
    for row, label in enumerate(("own sums", "xor 4", "xor 2", "xor 1: complete sum")):
        y = 50 + 45 * row
        d.text(10, y + 16, label)
        for lane in range(8):
            d.box(190 + 68 * lane, y, 50, 24, str(lane) if row == 0 else "", (BLUE, SKY, GREEN, RED)[row], True)
            if row:
                mask = 8 >> row
                d.arrow(215 + 68 * (lane ^ mask), y - 21, 215 + 68 * lane + (6 if lane & mask else -6), y)
    return d


def draft_and_verify() -> Drawing:
    """A step of speculative decoding."""
    d = Drawing("Drafts are guessed one by one and verified together: a step gives 1 to k + 1 tokens", 760, 200)
    d.text(10, 66, "draft model")
    for at, word in enumerate(("had", "two", "red", "plums")):
        d.box(110 + 90 * at, 48, 80, 28, word, SKY)
    d.text(10, 126, "model, one run")
    for at, (word, right) in enumerate((("had", True), ("two", True), ("plums", False))):
        d.box(110 + 90 * at, 108, 80, 28, word, GREEN if right else RED, True)
        d.arrow(150 + 90 * at, 76, 150 + 90 * at, 108)
    d.text(390, 126, "at the first difference, the model's own word is used")
    d.text(110, 172, "accepted with probability min(1, p / q), else drawn from max(0, p - q): the distribution is p")
    return d


DRAWINGS = {f.__name__: f for f in (one_layer, model_as_data, block_table, pair_of_codes, two_cuts,
                                    static_and_continuous, register_tile, butterfly, draft_and_verify)}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(f"{name}.svg")
