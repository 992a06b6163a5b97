"""Threads may parse at once."""

import ast
import gc
import sys
import threading

import pytest

from numflow import syntax

SOURCE = "def f(a, b):\n" + "    x = [a + b for a in range(3) if (a, b) == (1, 2)]\n" * 200


class _Slow:
    def __del__(self):  # collecting it in the middle of a tree lets another thread run
        [None for _ in range(100)]


@pytest.mark.merge
def test_threads_that_parse_at_once():
    """With ast.parse itself about one in ten of these fails in CPython 3.11."""
    found, count = [], 20

    def work():
        for _ in range(count):
            circle = []
            circle.append((circle, _Slow()))
            tree = syntax.parse(SOURCE)
            found.append(syntax.compiled(tree, "source") is not None)

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(10)
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert len(found) == 4 * count


def test_the_tree():
    assert isinstance(syntax.parse("a + 1", "eval").body, ast.BinOp)
