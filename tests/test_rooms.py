"""Rooms of the large packages: the tree against the table of rooms in docs/architecture.md."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.conftest import REPO

PACKAGE = REPO / "numflow"
IN_A_ROOM, BESIDE = 15, 9  # most files


def rooms() -> list[str]:
    """Rooms in the order of the architecture page, "cpu/simd" for example; "cpu" are files beside the rooms."""
    text = (REPO / "docs/architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+/(?:\w+/)?)` \| .+ \|$", text, re.M)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Modules of the packages with rooms by their dotted names."""
    packages = {room.split("/")[0] for room in rooms()}
    paths = [path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] in packages]
    return {".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
            for path in paths}


def room_of(path: Path) -> str:
    return path.parent.relative_to(PACKAGE).as_posix() + "/"


def imported(source: str, known) -> set[str]:
    """Modules that a source imports anywhere, or names in a string."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside if inside <= set(known) else inside | {node.module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(".") > 1:
            found.add(node.value)  # two dots at least: "numflow.server" is the name of a logger
    return found & set(known)


def upward(owner: str, others: list[str], order: list[str]) -> list[str]:
    """Rooms of the same package that a room imports although they stand below its line."""
    return [other for other in others if other.split("/")[0] == owner.split("/")[0]
            and order.index(other) > order.index(owner)]


def test_every_file_is_in_a_room():
    assert sorted({room_of(path) for path in modules().values()}) == sorted(rooms())


def test_rooms_are_small():
    files = Counter(room_of(path) for path in modules().values() if path.name != "__init__.py")
    most = {room: IN_A_ROOM if room.count("/") == 2 else BESIDE for room in files}
    assert {room: count for room, count in files.items() if count > most[room]} == {}


def test_rooms_import_rooms_above():
    known, order = modules(), rooms()
    found = []
    for name, path in known.items():
        others = imported(path.read_text(encoding="utf-8"), known)
        found += [f"{name} imports {other}" for other in sorted(others)
                  if upward(room_of(path), [room_of(known[other])], order)]
    assert found == []


def test_requests_and_schedules_need_no_program():
    """Both are checked, and tested, without anything that runs a model: what they import imports none either."""
    own = [name for name, path in modules().items() if room_of(path) in ("engine/request/", "engine/schedule/")]
    assert len(own) > 15
    code = f"import importlib, sys\nfor name in {own}: importlib.import_module(name)\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    programs = re.compile(r"numba|numflow\.(cpu|cuda|reference|partition|executor|engine\.(runner|speculate|run))\b")
    assert [name for name in done.stdout.split() if programs.match(name)] == []


def test_a_room_itself_imports_nothing():
    for room in rooms():
        if room.count("/") == 2:
            body = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")).body
            assert [node for node in body if not isinstance(node, ast.Expr)] == [], room


def test_the_check_finds_what_it_should():
    known = {"numflow.cpu.linear.walk", "numflow.cpu.simd.vector", "numflow.cpu.simd"}
    source = "def f():\n    from numflow.cpu.simd import vector\nCODE = Code('numflow.cpu.linear.walk')\n"
    assert imported(source, known) == {"numflow.cpu.simd.vector", "numflow.cpu.linear.walk"}
    assert imported("log = getLogger('numflow.server')", {"numflow.server"}) == set()
    order = ["cpu/simd/", "cpu/linear/", "cpu/", "cuda/lang/"]
    assert upward("cpu/linear/", ["cpu/simd/", "cpu/", "cuda/lang/"], order) == ["cpu/"]


def test_the_drawing_shows_these_rooms():
    from tests.draw_rooms import TARGET, drawing

    assert TARGET.read_text(encoding="utf-8") == drawing(), "python -m tests.draw_rooms draws it anew"
