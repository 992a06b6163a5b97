"""Groups of kernel parameters: a NamedTuple whose fields are types of kernel parameters.

    class Rows(NamedTuple):
        data: f32.ptr
        stride: u32

    @kernel()
    def _scale(y: Rows, x: Rows, factor: f32):
        y.data[block_x() * y.stride] = x.data[block_x() * x.stride] * factor

The compiled kernel has one parameter for each field, `y_data` and `y_stride`, and `y.stride` in the body becomes that
parameter, so a group has no cost on the device. `*y` stands for all fields, as arguments of a device function. A launch
passes a `Rows(...)`, whose fields can be given by name.
"""

import ast
import functools
import inspect
import textwrap
import types as pytypes
from collections.abc import Callable
from typing import NamedTuple

from numflow import syntax
from numflow.cuda.lang.scalar import f32, i32, u32


class Rows(NamedTuple):
    """Rows of float32. stride: elements from one row to the next."""

    data: f32.ptr
    stride: u32


class IntRows(NamedTuple):
    """Rows of int32. stride: elements from one row to the next."""

    data: i32.ptr
    stride: u32


class Places(NamedTuple):
    """The location of a batch's rows in a KV cache: position and sequence of each row, and the block table.

    counts[field]: number of rows.
    """

    positions: i32.ptr
    sequence_of: i32.ptr
    table: i32.ptr
    table_stride: u32
    counts: i32.ptr
    field: u32


class Following(NamedTuple):
    """All arrays that a sampling kernel updates to turn a decode batch into the batch of the next step.

    ids: the sampled tokens, [R, MOST_STEPS]. steps: number of them for each row. draws: random numbers of the steps,
    [R, MOST_STEPS].
    """

    ids: i32.ptr
    draws: u32.ptr
    steps: i32.ptr
    rows: i32.ptr
    tokens: i32.ptr
    positions: i32.ptr
    sequence_of: i32.ptr
    lengths: i32.ptr


class Texts(NamedTuple):
    """The sequences of a batch: first row of each, positions of the rows, state slots.

    counts[N_SEQUENCES]: number of sequences.
    """

    starts: i32.ptr
    positions: i32.ptr
    slots: i32.ptr
    counts: i32.ptr


class Slots(NamedTuple):
    """State memory of a recurrent step. stride: elements from one slot to the next."""

    data: f32.ptr
    stride: u32


def is_group(parameter) -> bool:
    """Whether a parameter is a group of parameters."""
    return isinstance(parameter, type) and issubclass(parameter, tuple)


def signature_of(parameters: tuple) -> tuple:
    """The parameters' types, with groups flattened."""
    return tuple(kind for parameter in parameters
                 for kind in (parameter.__annotations__.values() if is_group(parameter) else (parameter,)))


def flattened(body: Callable, parameters: tuple) -> Callable:
    """The body of a kernel with groups flattened: one parameter for each field.

    Raises:
        TypeError: the body uses a group other than by one of its fields, or as `*name`.
    """
    if not any(map(is_group, parameters)):
        return body
    code = _flat_code(body.__code__, parameters)
    cells = dict(zip(body.__code__.co_freevars, body.__closure__ or ()))
    flat = pytypes.FunctionType(code, body.__globals__, body.__name__, None, tuple(cells[n] for n in code.co_freevars))
    flat.__module__, flat.__qualname__, flat.__doc__ = body.__module__, body.__qualname__, body.__doc__
    return flat


@functools.cache
def _flat_code(code: pytypes.CodeType, parameters: tuple) -> pytypes.CodeType:
    """Compile the source of `code` again, with fields of groups replaced by names."""
    (function,) = syntax.parse(textwrap.dedent(inspect.getsource(code))).body
    names = [argument.arg for argument in function.args.args]
    fields = {name: parameter._fields for name, parameter in zip(names, parameters) if is_group(parameter)}
    flat = [each for name in names for each in (_names(name, fields[name]) if name in fields else [name])]
    taken = {*code.co_varnames[len(names):], *code.co_freevars, *code.co_names}
    if clash := sorted({each for name in fields for each in _names(name, fields[name])} & taken):
        raise TypeError(f"kernel {code.co_name}: {clash[0]} is a parameter's field and another name")
    rewrite = _Fields(code.co_name, fields)
    function.body = [rewrite.visit(statement) for statement in function.body]
    function.args.args, function.decorator_list = [ast.arg(name) for name in flat], []
    around = syntax.parse(f"def around({', '.join(code.co_freevars)}):\n    pass")  # gives closures their names
    around.body[0].body = [function]
    ast.increment_lineno(function, code.co_firstlineno - 1)
    made = syntax.compiled(ast.fix_missing_locations(around), code.co_filename)
    for _ in range(2):  # the module, the function around
        made = next(const for const in made.co_consts if isinstance(const, pytypes.CodeType))
    return made


def _names(name: str, fields: tuple[str, ...]) -> list[str]:
    return [f"{name}_{field}" for field in fields]


class _Fields(ast.NodeTransformer):
    """The AST transformation that replaces `group.field` by `group_field`, and `*group` by all fields."""

    def __init__(self, kernel: str, fields: dict[str, tuple[str, ...]]):
        self.kernel, self.fields = kernel, fields

    def visit_Attribute(self, node):
        if not (isinstance(node.value, ast.Name) and node.value.id in self.fields):
            return self.generic_visit(node)
        if node.attr not in self.fields[node.value.id]:
            raise TypeError(f"kernel {self.kernel}: {node.value.id} has no field {node.attr}")
        return ast.copy_location(ast.Name(f"{node.value.id}_{node.attr}", node.ctx), node)

    def visit_Call(self, node):
        args = []
        for argument in node.args:
            starred = isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name)
            if starred and argument.value.id in self.fields:
                args += [ast.copy_location(ast.Name(name, ast.Load()), argument)
                         for name in _names(argument.value.id, self.fields[argument.value.id])]
            else:
                args.append(argument)
        node.args = args
        return self.generic_visit(node)

    def visit_Name(self, node):
        if node.id in self.fields:
            raise TypeError(f"kernel {self.kernel}: {node.id} is used as a whole; name a field, or pass *{node.id}")
        return node
