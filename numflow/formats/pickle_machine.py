"""A safe interpreter of pickle opcodes, which imports and runs nothing.

Opcodes build lists, dictionaries, tuples and numbers. A global (`module.name`) is only looked up in the caller's table.
An unknown global is recorded as refused and replaced by `OPAQUE`, as are results of calling it, so that the rest of the
file is still read and all requests are listed. Values are passed by reference, never traversed or copied, so a small
file cannot create large values.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from numflow.errors import FormatError, UnsafePickleError
from numflow.formats.mapped import MappedFile

MAX_BYTES = 2**26  # size of one pickle
MAX_OPCODES = 2**22  # a tensor takes about 60; at most ten seconds in total
MAX_LINE = 2**12
MAX_REQUESTED = 1000


class Global(NamedTuple):
    """A global, `module.name`, as written in the file."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module[:100]}.{self.name[:100]}".encode("unicode_escape").decode()


class _Opaque:
    """Placeholder for a refused global, and for the result of calling one."""

    def __repr__(self) -> str:
        return "OPAQUE"


OPAQUE = _Opaque()


class Machine:
    """Interpreter of one pickle in a file: `run` returns its value; `position` is then after the last opcode.

    known:       allowed globals and their values. Callable values may be called.
    persistent:  persistent id -> value.
    requested:   all globals named so far, allowed or not. refused: those not allowed.
    """

    def __init__(self, file: MappedFile, start: int, end: int, known: Mapping[Global, Any],
                 persistent: Callable[[Any], Any]):
        self.file, self.data = file, file.map
        self.position, self.end = start, min(end, start + MAX_BYTES)
        self.known, self.persistent = known, persistent
        self.requested: dict[str, None] = {}
        self.refused: dict[str, None] = {}
        self.opcodes = MAX_OPCODES  # remaining opcodes
        self.memo: dict[int, Any] = {}
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # saved stacks below open marks

    def run(self) -> Any:
        """The value of the pickle.

        Raises:
            UnsafePickleError: the pickle requests unknown globals; `requested` lists them.
            FormatError: the pickle is damaged, too large, or has opcodes that checkpoints do not use.
        """
        try:
            value = self._interpret()
        except FormatError:
            if not self.refused:
                raise
        if self.refused:
            names = tuple(self.refused)
            more = "" if len(names) <= 10 else f" and {len(names) - 10} more"
            raise UnsafePickleError(f"{self.file.path}: refused, nothing was run: this pickle does not only hold "
                                    f"tensors, it asks for {', '.join(names[:10])}{more}", names)
        return value

    def _interpret(self) -> Any:
        while True:
            start = self.position
            self.spend(1)
            code = self.data[self.take(1)]
            if code == _STOP:
                return self.pop()
            if code not in _OPCODES:
                raise self.fail(f"opcode {bytes([code])!r} is not one that checkpoints use", start)
            read, execute = _OPCODES[code]
            try:
                execute(self, read(self))
            except (ValueError, TypeError, OverflowError) as error:
                raise self.fail(f"opcode {bytes([code])!r}: {error}", start) from None

    def spend(self, steps: int) -> None:
        self.opcodes -= steps
        if self.opcodes < 0:
            raise self.fail(f"it takes more than {MAX_OPCODES} steps")

    def fail(self, message: str, position: int | None = None) -> FormatError:
        return self.file.fail(f"pickle, byte {self.position if position is None else position}: {message}")

    # Reading arguments

    def take(self, count: int) -> int:
        start = self.position
        if count > self.end - start:
            raise self.fail(f"{count} bytes wanted, {self.end - start} are left (is it truncated?)")
        self.position = start + count
        return start

    def bytes(self, count: int) -> bytes:
        start = self.take(count)
        return self.data[start:start + count]

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, min(self.end, self.position + MAX_LINE))
        if end < 0:
            raise self.fail(f"no end of line within {MAX_LINE} bytes")
        return self.bytes(end + 1 - self.position)[:-1].decode("utf-8")

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack:
            raise self.fail("nothing on the stack")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack:
            raise self.fail("nothing on the stack")
        return self.stack[-1]

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise self.fail("no mark on the stack")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def put(self, key: int) -> None:
        if not 0 <= key < 2**32:
            raise ValueError(f"memo key {key} is out of range")
        self.memo[key] = self.top()

    def get(self, key: int) -> None:
        if key not in self.memo:
            raise ValueError(f"nothing in the memo at {key}")
        self.push(self.memo[key])

    # Containers

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, list):
            target.extend(items)
        elif target is not OPAQUE:
            raise TypeError(f"cannot append to {type(target).__name__}")

    def update(self, items: list[Any]) -> None:
        """Set entries of a dictionary. Entries whose key is no text are dropped, because they cannot name a tensor."""
        if len(items) % 2:
            raise ValueError("a key without a value")
        target = self.top()
        if isinstance(target, dict):
            target.update((k, v) for k, v in zip(items[::2], items[1::2]) if isinstance(k, str))
        elif target is not OPAQUE:
            raise TypeError(f"cannot set items of {type(target).__name__}")

    # Globals

    def find(self, module: Any, name: Any) -> Any:
        if not (isinstance(module, str) and isinstance(name, str)):
            return self.refuse("a global whose name is computed")
        wanted = Global(module, name)
        if wanted not in self.known:
            return self.refuse(str(wanted))
        self.requested[str(wanted)] = None
        return self.known[wanted]

    def refuse(self, what: str) -> _Opaque:
        if len(self.refused) < MAX_REQUESTED:
            self.requested[what] = self.refused[what] = None
        return OPAQUE

    def call(self, function: Any, args: Any) -> None:
        if function is OPAQUE or args is OPAQUE:
            return self.push(OPAQUE)
        if not callable(function) or not isinstance(args, tuple):
            raise TypeError(f"{type(function).__name__} is not to be called with {type(args).__name__}")
        self.spend(sum(len(a) for a in args if isinstance(a, list | tuple | dict)))  # a call may traverse its arguments
        try:
            value = function(*args)
        except (TypeError, ValueError):
            if not self.refused:
                raise
            value = OPAQUE
        return self.push(value)

    def reduce(self) -> None:
        args, function = self.pop(), self.pop()
        self.call(function, args)

    def make(self, items: list[Any]) -> None:
        """OBJ: a class and its arguments."""
        if not items:
            raise ValueError("no class")
        self.call(items[0], tuple(items[1:]))

    def new_with_keywords(self) -> None:
        keywords, args, function = self.pop(), self.pop(), self.pop()
        if keywords and function is not OPAQUE:
            raise TypeError("keyword arguments")
        self.call(function, args)

    def build(self) -> None:
        """BUILD: state of an object; ignored, because attributes of tensors and dictionaries are not needed."""
        self.pop()
        self.top()

    def load_persistent(self) -> None:
        key = self.pop()
        try:
            value = self.persistent(key)
        except (TypeError, ValueError):
            if not self.refused:
                raise
            value = OPAQUE
        self.push(value)


def _none(machine: Machine) -> None:
    return None


def _number(code: str):
    layout = struct.Struct(code)
    return lambda m: layout.unpack_from(m.data, m.take(layout.size))[0]


def _counted(code: str, decode: Callable[[bytes], Any]):
    count = _number(code)
    return lambda m: decode(m.bytes(count(m)))


def _long(data: bytes) -> int:
    if len(data) > 32:
        raise ValueError(f"a number of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def _text_int(machine: Machine) -> int | bool:
    text = machine.line().removesuffix("L")
    if len(text) > 40:
        raise ValueError(f"a number of {len(text)} digits")
    return text == "01" if text in ("00", "01") else int(text)


def _tuple(count: int):
    def do(machine: Machine, _: None) -> None:
        items = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(items)))
    return do


def _constant(make: Callable[[], Any]):
    return lambda m, _: m.push(make())


def _instance(machine: Machine, module: str) -> None:
    """INST: module and name on two lines, arguments above the mark."""
    function = machine.find(module, machine.line())
    machine.call(function, tuple(machine.pop_mark()))


def _dict(machine: Machine, _: None) -> None:
    items = machine.pop_mark()
    machine.push({})
    machine.update(items)


def _set_item(machine: Machine, _: None) -> None:
    value, key = machine.pop(), machine.pop()
    machine.update([key, value])


def _stack_global(machine: Machine, _: None) -> None:
    name, module = machine.pop(), machine.pop()
    machine.push(machine.find(module, name))


def _protocol(machine: Machine, version: int) -> None:
    if version > 5:
        raise ValueError(f"pickle protocol {version}")


def _extension(machine: Machine, code: int) -> None:
    machine.push(machine.refuse(f"copyreg extension {code}"))


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _latin1(data: bytes) -> str:
    return data.decode("latin-1")


_PUSH, _PUT, _GET = Machine.push, Machine.put, Machine.get
_STOP = ord(".")

# opcode: (reader of its argument, action)
_OPCODES: dict[int, tuple[Callable[[Machine], Any], Callable[[Machine, Any], None]]] = {ord(c): row for c, row in {
    "\x80": (_number("<B"), _protocol), "\x95": (_number("<Q"), lambda m, _: None),
    # numbers and text
    "N": (_none, _constant(lambda: None)), "\x88": (_none, _constant(lambda: True)),
    "\x89": (_none, _constant(lambda: False)),
    "J": (_number("<i"), _PUSH), "K": (_number("<B"), _PUSH), "M": (_number("<H"), _PUSH),
    "I": (_text_int, _PUSH), "L": (_text_int, _PUSH), "G": (_number(">d"), _PUSH),
    "F": (lambda m: float(m.line()), _PUSH),
    "\x8a": (_counted("<B", _long), _PUSH), "\x8b": (_counted("<I", _long), _PUSH),
    "X": (_counted("<I", _utf8), _PUSH), "\x8c": (_counted("<B", _utf8), _PUSH), "\x8d": (_counted("<Q", _utf8), _PUSH),
    "T": (_counted("<I", _latin1), _PUSH), "U": (_counted("<B", _latin1), _PUSH),
    "B": (_counted("<I", bytes), _PUSH), "C": (_counted("<B", bytes), _PUSH), "\x8e": (_counted("<Q", bytes), _PUSH),
    "S": (lambda m: m.line().strip("'\""), _PUSH), "V": (lambda m: m.line(), _PUSH),
    # the stack and the memo
    "(": (_none, lambda m, _: m.mark()), "0": (_none, lambda m, _: m.pop()), "1": (_none, lambda m, _: m.pop_mark()),
    "2": (_none, lambda m, _: m.push(m.top())),
    "q": (_number("<B"), _PUT), "r": (_number("<I"), _PUT), "p": (_text_int, _PUT),
    "\x94": (_none, lambda m, _: m.put(len(m.memo))),
    "h": (_number("<B"), _GET), "j": (_number("<I"), _GET), "g": (_text_int, _GET),
    # containers
    "]": (_none, _constant(list)), "}": (_none, _constant(dict)), ")": (_none, _constant(tuple)),
    "\x85": (_none, _tuple(1)), "\x86": (_none, _tuple(2)), "\x87": (_none, _tuple(3)),
    "t": (_none, lambda m, _: m.push(tuple(m.pop_mark()))), "l": (_none, lambda m, _: m.push(m.pop_mark())),
    "d": (_none, _dict), "s": (_none, _set_item), "u": (_none, lambda m, _: m.update(m.pop_mark())),
    "a": (_none, lambda m, _: m.extend([m.pop()])), "e": (_none, lambda m, _: m.extend(m.pop_mark())),
    # globals, looked up in a table, and calls of them
    "c": (lambda m: (m.line(), m.line()), lambda m, names: m.push(m.find(*names))), "\x93": (_none, _stack_global),
    "R": (_none, lambda m, _: m.reduce()), "\x81": (_none, lambda m, _: m.reduce()),
    "\x92": (_none, lambda m, _: m.new_with_keywords()), "o": (_none, lambda m, _: m.make(m.pop_mark())),
    "i": (lambda m: m.line(), _instance), "b": (_none, lambda m, _: m.build()),
    "Q": (_none, lambda m, _: m.load_persistent()),
    "\x82": (_number("<B"), _extension), "\x83": (_number("<H"), _extension), "\x84": (_number("<i"), _extension),
}.items()}
