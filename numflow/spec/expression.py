"""The expression language of specification files: `"sqrt(hidden)"`, `"window if (layer + 1) % 6 else 0"`.

The syntax is Python's. An interpreter walks the syntax tree and allows only arithmetic, comparisons, conditionals,
list subscripts and a few functions. Names are the spec's parameters, and `layer`.
Specs may come with model files and are not trusted. Therefore the size of each result is checked before it is computed,
and evaluation steps are counted, so that no expression runs long or allocates much memory.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from numflow import syntax


def get(table: Any, key: Any, otherwise: Any = None) -> Any:
    """The value of a key in an object, else `otherwise`. An integer key also matches its text, with leading zeros."""
    if table is None:
        return otherwise
    if not isinstance(table, Mapping):
        raise TypeError(f"get() looks into an object, found {type(table).__name__}")
    if key in table or not isinstance(key, int):
        return table.get(key, otherwise)
    return next((value for word, value in table.items() if word.isdecimal() and int(word) == key), otherwise)


def place(values: Any, item: Any) -> int:
    """The index of an item in a list, from 0."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"place() looks into a list, found {type(values).__name__}")
    return list(values).index(item)


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
    "get": get,
    "place": place,
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
_DEEPEST = 40
_MOST_ITEMS = 10_000  # in a list or text that an expression makes, nested items included
_MOST_BITS = 1024  # of an integer: about the range of float64


class ExpressionError(ValueError):
    """Error: the text is no expression of this language, or its value cannot be computed."""


class Steps:
    """Step budget shared by all expressions of a spec. Each node and each item that is read takes one step."""

    def __init__(self, most: int = 5_000_000):
        self.most = self.left = most

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ExpressionError(f"the expressions of this spec take more than {self.most} steps")


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """The syntax tree of `text`.

    Raises:
        ExpressionError: not an expression, or it uses something outside the language.
    """
    if len(text) > _LONGEST:
        raise ExpressionError(f"expression longer than {_LONGEST} characters")
    try:
        tree = syntax.parse(text.strip(), "eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text!r} is no expression ({getattr(error, 'msg', error)})") from None
    level, depth = [tree], 0
    while level:
        for node in level:
            if not _allowed(node):
                raise ExpressionError(f"{text!r}: {type(node).__name__.lower()} is not part of the expression language")
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
        if depth > _DEEPEST:
            raise ExpressionError(f"{text[:60]!r}...: nested more than {_DEEPEST} deep")
    return tree


def evaluate(text: str, name: Callable[[str], Any], functions: dict[str, Callable] | None = None,
             steps: Steps | None = None) -> Any:
    """The value of `text`; `name(word)` gives the value of a name, `functions` adds to FUNCTIONS.

    steps: the step budget that several expressions share.

    Raises:
        ExpressionError: the text is wrong or the arithmetic fails (division by zero, wrong types, ...).
    """
    tree = parse(text)
    try:
        return _Evaluation(name, {**FUNCTIONS, **(functions or {})}, steps or Steps()).value(tree)
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


class _Evaluation:
    """Interpreter of one syntax tree."""

    def __init__(self, name: Callable[[str], Any], functions: dict[str, Callable], steps: Steps):
        self.name, self.functions, self.steps = name, functions, steps

    def value(self, node: ast.expr) -> Any:
        self.steps.take(1)
        value = self.value
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return CONSTANTS[node.id] if node.id in CONSTANTS else self.name(node.id)
            case ast.BinOp():
                left, right = value(node.left), value(node.right)
                if isinstance(node.op, ast.Mult):
                    _check_numbers((node.left, left), (node.right, right))
                return self._binary(type(node.op), left, right)
            case ast.UnaryOp():
                return _UNARY[type(node.op)](value(node.operand))
            case ast.BoolOp():
                return self._and_or(node)
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp():
                return value(node.body) if value(node.test) else value(node.orelse)
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.List() | ast.Tuple():
                return self._count_new([value(child) for child in node.elts])
            case ast.Call():
                if node.func.id not in self.functions:
                    known = ", ".join(sorted(self.functions))
                    raise ExpressionError(f"no function {node.func.id!r}; there are {known}")
                arguments = [value(child) for child in node.args]
                self._count_items(*arguments)
                return self.functions[node.func.id](*arguments)
        raise ExpressionError(f"{type(node).__name__} is not part of the expression language")

    def _binary(self, op: type, left: Any, right: Any) -> Any:
        """Arithmetic of numbers; concatenation of lists and texts; repetition of lists. Sizes are limited."""
        lists = [value for value in (left, right) if isinstance(value, (list, tuple, str))]
        if not lists:
            return _BINARY[op](*_checked_size(op, left, right))
        if op is ast.Mult and len(lists) == 1 and isinstance(lists[0], list):
            count = right if lists[0] is left else left
            if isinstance(count, int) and max(1, items(lists[0], _MOST_ITEMS)) * count > _MOST_ITEMS:
                raise ExpressionError(f"makes a list of more than {_MOST_ITEMS} items")
        elif op is not ast.Add or len(lists) != 2:
            raise TypeError(f"{op.__name__.lower()} is for numbers, found {type(lists[0]).__name__}")
        return self._count_new(_BINARY[op](left, right))

    def _and_or(self, node: ast.BoolOp) -> Any:
        values = iter(node.values)
        result = self.value(next(values))
        for child in values:
            if bool(result) == isinstance(node.op, ast.Or):
                return result
            result = self.value(child)
        return result

    def _compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for op, child in zip(node.ops, node.comparators, strict=True):
            right = self.value(child)
            self._count_items(left, right)
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _count_new(self, value: Any) -> Any:
        count = items(value, _MOST_ITEMS)
        if count > _MOST_ITEMS:
            raise ExpressionError(f"makes a list of more than {_MOST_ITEMS} items")
        self.steps.take(count)
        return value

    def _count_items(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, (list, tuple, str, dict)):
                self.steps.take(items(value, self.steps.left))


def _check_numbers(*factors: tuple[ast.expr, Any]) -> None:
    """Refuse to multiply a named list: such a list has one value per layer, and repeating the list is a mistake."""
    for node, value in factors:
        if isinstance(node, ast.Name) and isinstance(value, (list, tuple)):
            raise TypeError(f"{node.id} is a list of {len(value)} values; {node.id}[layer] is that of a layer")


def _checked_size(op: type, left: Any, right: Any) -> tuple[Any, Any]:
    """Both operands, if the result is an integer of at most _MOST_BITS bits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {ast.Mult: left.bit_length() + right.bit_length(), ast.Pow: left.bit_length() * max(right, 1),
                ast.Add: max(left.bit_length(), right.bit_length()) + 1}.get(op, 0)
        if bits > _MOST_BITS:
            raise ExpressionError(f"makes an integer of more than {_MOST_BITS} bits")
    return left, right


def items(value: Any, most: int) -> int:
    """Number of items in a list or text, nested items included. Counting stops above `most`."""
    if isinstance(value, str):
        total = len(value)
    elif isinstance(value, (list, tuple, dict)):
        total = len(value)
        for item in value.values() if isinstance(value, dict) else value:
            if total > most:
                break
            total += items(item, most - total)
    else:
        return 0
    return total
