"""Device functions that are created anew for each kernel are compiled once if they are equal, and only then."""

import pytest

from numflow.cuda.compiler.compat import compiler
from numflow.cuda.compiler.compile import content
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.kernel import DeviceFunction, device, rewired
from numflow.cuda.lang.scalar import f32, u32


def _adder(number, memory=None, inner=None) -> DeviceFunction:
    @device
    def add(x):
        place = memory() if memory is not None else None
        return inner(x) if inner is not None else (x, place, number)
    return add


def _contents(*made: DeviceFunction):
    """Contents of functions rewired as for the compiler, with stand-ins compared by content."""
    known = {}

    def convert(thing):
        return known.setdefault(content(thing), thing) if hasattr(thing, "__code__") else thing

    return [content(rewired(function.body, convert, {})) for function in made]


@pytest.mark.parametrize("arguments", [
    lambda: (2,), lambda: (1.5,), lambda: ((1, 2),), lambda: (0, LocalArray(u32, 4)), lambda: (0, None, _adder(3))])
def test_equal_helpers_are_one(arguments):
    first, second = _contents(_adder(*arguments()), _adder(*arguments()))
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize(("one", "other"), [
    ((1,), (2,)), ((1,), (1.0,)), ((1,), (True,)), ((0.0,), (-0.0,)), (((1, 2),), ((1, 2.0),)),
    ((0, LocalArray(u32, 4)), (0, LocalArray(u32, 8))), ((0, LocalArray(u32, 4)), (0, LocalArray(f32, 4))),
    ((0, SharedArray(u32, 4)), (0, SharedArray(u32, 4))),  # two separate arrays
    ((0, None, _adder(1)), (0, None, _adder(2)))])
def test_others_are_not(one, other):
    first, second = _contents(_adder(*one), _adder(*other))
    assert first != second


def test_the_compiler_s_settings_are_equal_where_all_values_are():
    pytest.importorskip("numba_cuda")
    compiler()
    from numba.cuda.flags import Flags

    plain, same, other = Flags(), Flags(), Flags()
    same.forceinline, other.forceinline = Flags.options["forceinline"].default, True
    assert plain == same and hash(plain) == hash(same)
    assert plain != other and other == other.copy() and hash(other) == hash(other.copy()) and plain != 3
