"""The small arithmetic of specification files: `"sqrt(hidden)"`, `"window if (layer + 1) % 6 else 0"`.

Python's expression syntax, walked over its syntax tree with an allow-list, so nothing but arithmetic, comparisons,
conditionals, look-ups in lists and a handful of functions exists. Names are the spec's parameters, plus `layer`.
"""

import ast
import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

CONSTANTS = {"true": True, "false": False, "none": None, "pi": math.pi}
FUNCTIONS = {
    "sqrt": math.sqrt,
    "log": math.log,
    "min": min,
    "max": max,
    "int": int,
    "float": float,
    "abs": abs,
    "len": len,
    "ceil": math.ceil,
}
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_UNARY = {ast.USub: operator.neg, ast.Not: operator.not_, ast.UAdd: operator.pos}
_LONGEST = 500
_LARGEST_POWER = 64


class ExpressionError(ValueError):
    """The text is not an expression of this language, or cannot be computed; says why."""


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """The syntax tree of `text`.

    Raises:
        ExpressionError: not an expression, or it uses something outside the language.
    """
    if len(text) > _LONGEST:
        raise ExpressionError(f"expression longer than {_LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text!r} is no expression ({getattr(error, 'msg', error)})") from None
    for node in ast.walk(tree):
        if not _allowed(node):
            raise ExpressionError(f"{text!r}: {type(node).__name__.lower()} is not part of the expression language")
    return tree


def evaluate(text: str, name: Callable[[str], Any], functions: dict[str, Callable] | None = None) -> Any:
    """The value of `text`; `name(word)` gives the value of a name, `functions` adds to FUNCTIONS.

    Raises:
        ExpressionError: the text is wrong or the arithmetic fails (division by zero, wrong types, ...).
    """
    tree = parse(text)
    try:
        return _value(tree, name, {**FUNCTIONS, **(functions or {})})
    except (ArithmeticError, TypeError, ValueError, IndexError, KeyError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{text!r} cannot be computed: {error}") from None


def _allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float, str, bool))
    return isinstance(
        node,
        (
            ast.Name,
            ast.Load,
            ast.BinOp,
            ast.UnaryOp,
            ast.BoolOp,
            ast.Compare,
            ast.IfExp,
            ast.Subscript,
            ast.List,
            ast.Tuple,
            ast.And,
            ast.Or,
            *_BINARY,
            *_COMPARE,
            *_UNARY,
        ),
    )


def _value(node: ast.expr, name: Callable[[str], Any], functions: dict[str, Callable]) -> Any:
    def go(child):
        return _value(child, name, functions)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return CONSTANTS[node.id] if node.id in CONSTANTS else name(node.id)
        case ast.BinOp():
            left, right = go(node.left), go(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_POWER:
                raise ExpressionError(f"power of {right} is too large")
            return _BINARY[type(node.op)](left, right)
        case ast.UnaryOp():
            return _UNARY[type(node.op)](go(node.operand))
        case ast.BoolOp():
            values = iter(node.values)
            result = go(next(values))
            for child in values:
                if bool(result) == isinstance(node.op, ast.Or):
                    return result
                result = go(child)
            return result
        case ast.Compare():
            left = go(node.left)
            for op, child in zip(node.ops, node.comparators, strict=True):
                right = go(child)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.IfExp():
            return go(node.body) if go(node.test) else go(node.orelse)
        case ast.Subscript():
            return go(node.value)[go(node.slice)]
        case ast.List() | ast.Tuple():
            return [go(child) for child in node.elts]
        case ast.Call():
            if node.func.id not in functions:
                raise ExpressionError(f"no function {node.func.id!r}; there are {', '.join(sorted(functions))}")
            return functions[node.func.id](*(go(child) for child in node.args))
    raise ExpressionError(f"{type(node).__name__} is not part of the expression language")
