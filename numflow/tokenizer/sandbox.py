"""Jinja environment for untrusted templates: Jinja's sandbox with limits on time and size.

Jinja's sandbox isolates a template from Python, but does not limit its time and memory. Here loops, conditions,
look-ups, comparisons, calls, filters, tests and operators check the clock, and the size of every value that a template
assigns, compares, passes on or prints is checked before it can grow further, so that no single operation takes long.
Variables of the caller (messages, tools) are measured once, when rendering starts.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import BuiltinFunctionType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_environment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
MAX_SIZE = 1 << 24  # maximum characters of the output, and of any intermediate value
ITEM_SIZE = 64  # size counted for an item of a container
MAX_NUMBER = 1 << 16  # maximum integer argument of a filter or string method (width, count)
MAX_BITS = 1 << 12  # maximum bits of an integer
_REMOVED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")  # slow on long text, and not used in chat templates
_WIDTH = re.compile(r"\d{5}|%[-+ #0]*\*|%[^%]*\.\*|\{[^{}]*\{")  # a literal width, or one from an argument
_clock = threading.local()


class TooLarge(SecurityError):
    """A template exceeded a limit."""


def start_clock(variables: Mapping[str, Any]) -> None:
    """Start the time limit of this thread's template, and measure `variables`."""
    _clock.deadline = time.monotonic() + MAX_SECONDS
    _clock.sizes = {}
    _measure(variables)


def _measure(value: Any) -> int:
    """Size of a value, cached by id for the value and its items: the caller holds them while the template runs."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, Mapping | list | tuple):
        return 1
    items = (*value, *value.values()) if isinstance(value, Mapping) else value
    _clock.sizes[id(value)] = total = len(value) * ITEM_SIZE + sum(map(_measure, items))
    return total


def check_time() -> None:
    if time.monotonic() > _clock.deadline:
        raise TooLarge(f"takes more than {MAX_SECONDS:g} s")


def in_time(value: Any) -> Any:
    """Return the value if the time limit is not exceeded."""
    check_time()
    return value


def size(value: Any, budget: int = MAX_SIZE) -> int:
    """Size of a value: characters of text, and ITEM_SIZE per item of a container, recursively.

    Raises:
        TooLarge: the size exceeds the budget.
    """
    items: Iterable[Any] = ()
    if isinstance(value, str | bytes):
        total = len(value)
    elif id(value) in _clock.sizes:
        return _clock.sizes[id(value)]
    elif isinstance(value, Mapping):
        total, items = len(value) * ITEM_SIZE, (*value, *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        total, items = len(value) * ITEM_SIZE, value
    else:
        return 1
    for item in items:
        if total > budget:
            break
        total += size(item, budget - total)
    if total > budget:
        raise TooLarge(f"makes a value of more than {MAX_SIZE} characters")
    return total


def bounded(value: Any) -> Any:
    """Return the value if neither size nor time limit is exceeded."""
    check_time()
    size(value)
    return value


def metered(items: Iterator[Any]) -> Iterator[Any]:
    """Items of a lazy filter, with checks of time and total size."""
    total = 0
    for item in items:
        check_time()
        total += ITEM_SIZE + size(item)
        if total > MAX_SIZE:
            raise TooLarge(f"makes a value of more than {MAX_SIZE} characters")
        yield item


def check_growth(subject: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse a filter or string method if the size of `subject` times the largest argument exceeds the limit."""
    total, largest = max(1, size(subject)), 1
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_NUMBER:
            raise TooLarge(f"uses a number above {MAX_NUMBER} as an argument")
        largest = max(largest, size(argument), abs(argument) if isinstance(argument, int) else 1)
    if total * largest > 16 * MAX_SIZE:
        raise TooLarge(f"may make a value of more than {16 * MAX_SIZE} characters")


class _Watch(NodeTransformer):
    """Add time checks to loops and conditions, and size checks to values that are assigned, compared or joined."""

    def visit_If(self, node: nodes.If) -> nodes.If:
        self.generic_visit(node)
        node.test = _filtered(node.test, "in_time")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filtered(node.expr)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr)
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        look = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None))
        node.body.insert(0, look.set_lineno(node.lineno))
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:
        self.generic_visit(node)
        node.node = _filtered(node.node)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        node.nodes = [_filtered(part) for part in node.nodes]
        return _filtered(node)


def _filtered(node: Any, name: str = "bounded") -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the limits above."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    check_time = staticmethod(check_time)

    def __init__(self, **options: Any):
        super().__init__(finalize=bounded, **options)
        self.globals.pop("lipsum")
        for name in _REMOVED:
            self.filters.pop(name)
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.add_filter("sum", self._sum)
        self.filters |= {"bounded": bounded, "in_time": in_time}
        for name, function in list(self.tests.items()):
            self.tests[name] = _checked(function, grows=False)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, with checks of time and size."""
        self.filters[name] = _checked(function)

    @staticmethod
    @pass_environment
    def _sum(environment: "BoundedEnvironment", items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        """Jinja's filter "sum" by the environment's `+`, which checks time and size at every step."""
        take = make_attrgetter(environment, attribute) if attribute is not None else lambda item: item
        for item in items:
            start = environment.call_binop(None, "+", start, take(item))
        return start

    def getattr(self, obj: Any, attribute: str) -> Any:
        check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_time()
        return super().getitem(obj, argument)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Watch().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_time()
        integers = isinstance(left, int) and isinstance(right, int)
        bits = (left.bit_length(), right.bit_length()) if integers else (0, 0)
        if operator == "**" and integers and bits[0] * max(right, 1) > MAX_BITS:
            raise TooLarge("makes a number that is too large")
        if operator == "*" and (sum(bits) > MAX_BITS or (not integers and size(left) * size(right) * max(
                *(abs(n) if isinstance(n, int) else 1 for n in (left, right))) > MAX_SIZE)):
            raise TooLarge(f"makes a value of more than {MAX_SIZE} characters")
        if operator == "%" and isinstance(left, str):
            _check_format(left, (right,))
        return bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_time()
        if isinstance(function, Macro) or function is self.globals["range"]:
            size((*args, *kwargs.values()))
            return super().call(context, function, *args, **kwargs)
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        subject = method.__self__ if isinstance(method, BuiltinFunctionType) else None
        if isinstance(subject, str) and method.__name__ in ("format", "format_map"):
            _check_format(subject, args)
        arguments = (*args, *kwargs.values())
        if isinstance(subject, str | bytes):
            check_growth(subject, arguments)
        else:
            size(arguments)
        return bounded(super().call(context, function, *args, **kwargs))


def _check_format(template: str, arguments: tuple[Any, ...]) -> None:
    """Refuse format strings with a width above 9999, or a width from an argument."""
    if _WIDTH.search(template):
        raise TooLarge("uses a width of more than 9999, or one from an argument, in a format")
    size(arguments)


def _checked(function: Callable[..., Any], grows: bool = True) -> Callable[..., Any]:
    """A filter or test with checks of time, arguments and result; keeps Jinja's attributes of the function."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_time()
        subject, *others = args[skipped:]
        if function.__name__ == "do_format":
            _check_format(str(subject), (*others, *kwargs.values()))
        (check_growth if grows else lambda *given: size(given))(subject, (*others, *kwargs.values()))
        result = function(*args, **kwargs)
        return metered(result) if isinstance(result, Iterator) else bounded(result)

    return checked
