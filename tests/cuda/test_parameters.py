"""Groups of kernel parameters: NamedTuples whose fields are passed one by one."""

from typing import NamedTuple

import numpy as np
import pytest

from numflow.cuda.compiler.compile import digest
from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.lang.intrinsics import thread_index
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.parameters import Rows, flattened, signature_of
from numflow.cuda.lang.scalar import f32, u32
from numflow.errors import DeviceError


class _Line(NamedTuple):
    """a + b * x"""

    a: f32
    b: f32


@device
def _of(x, a, b):
    return a + b * x


def _kernel(count: int):
    """y[i] = a + b * x[i * stride] for `count` elements."""

    @kernel(f"parameters_probe_{count}", 32)
    def _probe(y: f32.ptr, line: _Line, x: Rows):
        i = u32(thread_index())
        if i < count:
            y[i] = _of(x.data[i * x.stride], *line)

    return _probe


def _run(made, *args) -> list[float]:
    simulated = Simulated()
    y, x = simulated.alloc(16), simulated.alloc(64)
    simulated.upload(y.at(), np.zeros(4, np.float32))
    simulated.upload(x.at(), np.arange(16, dtype=np.float32))
    simulated.launch(Launch(made, (1, 1, 1), tuple(value(y.at(), x.at()) for value in args)))
    return simulated.download(y.at(), 16).view(np.float32).tolist()


def test_fields_are_parameters_of_their_own():
    made = _kernel(3)
    assert made.parameters == (f32.ptr, _Line, Rows)
    assert made.signature == signature_of(made.parameters) == (f32.ptr, f32, f32, f32.ptr, u32)
    assert made.body.__code__.co_varnames[:5] == ("y", "line_a", "line_b", "x_data", "x_stride")
    assert made.location.startswith("tests/cuda/test_parameters.py:")
    assert _run(made, lambda y, x: y, lambda y, x: _Line(b=2.0, a=0.5), lambda y, x: Rows(x, 4)) == [0.5, 8.5, 16.5, 0]


def test_kernels_of_other_constants_share_code():
    assert _kernel(3).body.__code__ is _kernel(4).body.__code__
    assert digest(_kernel(3)) != digest(_kernel(4))


@pytest.mark.parametrize(("args", "said"), [
    ((lambda y, x: y, lambda y, x: _Line(0.0, 0.0)), "has 3 parameters, 2 were given"),
    ((lambda y, x: y, lambda y, x: Rows(x, 1), lambda y, x: Rows(x, 1)), "parameter 1 is _Line, Rows was given"),
    ((lambda y, x: y, lambda y, x: _Line(0.0, 0.0), lambda y, x: x), "parameter 2 is Rows, one value was given"),
    ((lambda y, x: Rows(y, 1), lambda y, x: _Line(0.0, 0.0), lambda y, x: Rows(x, 1)),
     "parameter 0 is one value, Rows was given")])
def test_a_launch_passes_what_is_written(args, said):
    with pytest.raises(DeviceError, match=f"kernel parameters_probe_3.*{said}"):
        _run(_kernel(3), *args)


def _whole(line: _Line, x: f32.ptr):
    x[0] = line


def _unknown(line: _Line, x: f32.ptr):
    x[0] = line.c


def _clash(line: _Line, x: f32.ptr):
    line_a = f32(1)
    x[0] = line_a + line.a


@pytest.mark.parametrize(("body", "said"), [
    (_whole, "line is used as a whole"), (_unknown, "line has no field c"), (_clash, "line_a is a parameter's field")])
def test_other_uses_are_refused(body, said):
    with pytest.raises(TypeError, match=said):
        flattened(body, (_Line, f32.ptr))


def test_what_has_no_fields_stays_as_it_is():
    assert flattened(_of.body, (f32, f32, f32)) is _of.body
