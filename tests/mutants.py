"""Change one line at a time in a copy of the tree, and see that the tests named for it notice: `make mutants`.

tests/mutants.toml is the list. A change that its tests pass with survives; one whose text is not in its file exactly
once, or that its tests cannot begin with, says nothing. Each of them fails the run.

    python -m tests.mutants [WORD ...]     all of them, or those with one of the words in their file or name
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("numflow", "specs", "tests", "docs", "experiments", "pyproject.toml", "README.md")
HANGS = 120  # seconds after which the tests of a change count as hanging, which is noticed too
PASSED, FAILED = 0, 1  # what pytest ends with; anything else is no result


@dataclass(frozen=True)
class Mutant:
    """One change. what: it does, in words. text: in `file`, exactly once; becomes: what stands there instead."""

    what: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]

    def changed(self, source: str) -> str | None:
        """The file with the change; None where the text is not there once."""
        return source.replace(self.text, self.becomes) if source.count(self.text) == 1 else None


def read(path: Path = LIST) -> list[Mutant]:
    """The list."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in rows]


def copy(target: Path) -> Path:
    """The tree as it is now, without what compilers and caches left in it."""
    for name in COPIED:
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(REPO / name, target / name)
    return target


def passes(tree: Path, tests: Sequence[str], hangs: int = HANGS) -> tuple[int, str]:
    """(pytest's exit code, what it said) in a copy of the tree."""
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line",
                               "-o", "faulthandler_timeout=0", *tests], cwd=tree, stdin=subprocess.DEVNULL,
                              env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
                              capture_output=True, text=True, timeout=hangs)
    except subprocess.TimeoutExpired:  # a loop that goes on for ever: killed from outside, whatever it is in
        return FAILED, f"no end after {hangs} s"
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant, tree: Path) -> str:
    """What becomes of a change: "killed", or why that cannot be said."""
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    changed = mutant.changed(source)
    if changed is None:
        return f"its text is there {source.count(mutant.text)} times"
    path.write_text(changed, encoding="utf-8")
    try:
        code, output = passes(tree, mutant.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    if code == FAILED:
        return "killed"
    return "SURVIVED" if code == PASSED else f"its tests end with {code}:\n{output[-2000:]}"


def main(words: Sequence[str]) -> int:
    """1 if any change was not killed."""
    mutants = [m for m in read() if not words or any(word in f"{m.file} {m.what}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="numflow-mutants-") as folder:
        tree = copy(Path(folder))
        code, output = passes(tree, sorted({test for mutant in mutants for test in mutant.tests}), 5 * HANGS)
        if code != PASSED:
            print(f"without any change the tests end with {code}:\n{output[-4000:]}")
            return 1
        fates = []
        for mutant in mutants:
            begun = time.perf_counter()
            fates.append(judge(mutant, tree))
            print(f"{time.perf_counter() - begun:5.1f} s  {mutant.file}: {mutant.what}: {fates[-1]}", flush=True)
    killed = fates.count("killed")
    print(f"{killed} of {len(mutants)} changes were noticed")
    return 0 if mutants and killed == len(mutants) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition(":")[0])
    parser.add_argument("words", nargs="*", help="only changes with one of these words in their file or name")
    sys.exit(main(parser.parse_args().words))
