"""Python's parser, one thread at a time.

CPython before 3.13 counts the recursion depth of the parser for all threads together: two threads that parse at once
may fail with a SystemError ("AST constructor recursion depth mismatch").
"""

import ast
import threading
from types import CodeType
from typing import Any

_PARSER = threading.Lock()


def parse(text: str, mode: str = "exec") -> Any:
    """The syntax tree of `text`, as ast.parse gives it.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as ast.parse.
    """
    with _PARSER:
        return ast.parse(text, mode=mode)


def compiled(tree: Any, filename: str) -> CodeType:
    """Code of a module's syntax tree."""
    with _PARSER:
        return compile(tree, filename, "exec")
