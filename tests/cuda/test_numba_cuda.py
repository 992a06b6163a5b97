"""docs/numba-cuda.md: both versions of its kernel run and give the same bits, and its tables agree with the code."""

import math
import os
import re
import subprocess
import sys
from functools import reduce

import numpy as np
import pytest

from numflow.cuda.compiler import compile as compiling
from numflow.cuda.lang import arithmetic, cluster, float4, float8, intrinsics, scalar, tensor_memory, warpgroup
from numflow.cuda.lang.intrinsic import ALL
from tests.conftest import REPO

TEXT = (REPO / "docs/numba-cuda.md").read_text(encoding="utf-8")
FORMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)
LOWERING = "".join((REPO / f"numflow/cuda/compiler/lowering_{name}.py").read_text(encoding="utf-8")
                   for name in ("builtin", "cluster", "tensor"))


def table(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, by rows."""
    part = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return rows[2:]


def code(cell: str) -> list[str]:
    """The text in backticks."""
    return re.findall(r"`([^`]+)`", cell)


INTRINSICS = {code(row[0])[0].partition("(")[0]: row for row in table("Intrinsics")}


def test_both_forms_give_the_same_bits(tmp_path):
    pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    results = []
    for number, form in enumerate(FORMS):
        path = tmp_path / f"form{number}.py"
        path.write_text(f"{form}\nnp.save({str(tmp_path / str(number))!r}, result)\n")
        subprocess.run([sys.executable, path], check=True, cwd=REPO, timeout=300,
                       env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONWARNINGS": "ignore"})
        results.append(np.load(tmp_path / f"{number}.npy"))
    ours, plain = results
    x = np.random.default_rng(0).standard_normal((3, 200), np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(ours.reshape(x.shape), expected, rtol=1e-6)
    np.testing.assert_array_equal(ours, plain)


def test_the_forms_differ_in_names_only():
    """The same kernel line for line, after names are replaced by the tables."""
    names = {"uint32": "u32", "float32": "f32", "math.sqrt": "sqrt", "cuda.syncthreads": "sync_block",
             "cuda.blockIdx.x": "block_x()", "cuda.threadIdx.x": "thread_index()",
             "cuda.shared.array(64, float32)": "sums()"}
    bodies = [re.search(r"def rms\(.*?\n(.*?)\n\n\n", form, re.S)[1] for form in FORMS]
    plain = bodies[1]
    for theirs, ours in sorted(names.items(), key=lambda pair: -len(pair[0])):
        plain = plain.replace(theirs, ours)
    assert plain == bodies[0]


def test_every_intrinsic_has_a_row():
    assert sorted(INTRINSICS) == sorted(ALL)
    places = intrinsics, arithmetic, float4, float8, warpgroup, cluster, tensor_memory
    assert all(any(hasattr(module, name) for module in places) for name in ALL)


@pytest.mark.parametrize("name", INTRINSICS)
def test_what_an_intrinsic_is_made_of(name):
    _, _, _, made = INTRINSICS[name]
    how = ALL[name].how
    where = str(how) if how[0] == "asm" or how[0].startswith("math.") else f"{how[0]} {LOWERING}"
    for text in code(made):
        if "vector" not in made and "atomic" not in made:  # LLVM operations, whose PTX names are not in the code
            assert text in where, f"{name} is not made of {text}"


@pytest.mark.parametrize("name", [name for name, row in INTRINSICS.items() if row[1] != "-"])
def test_names_of_numba_cuda_exist(name):
    cuda = pytest.importorskip("numba.cuda")
    (theirs,) = code(INTRINSICS[name][1])
    scope = {"cuda": cuda, "math": math, "np": np, "array": np.zeros(4, np.float32)}
    if theirs.startswith("array"):
        assert eval(theirs, scope).size
        return
    first, *rest = theirs.split(".")
    if rest[0] == "libdevice":
        from numba.cuda import libdevice

        assert hasattr(libdevice, rest[1])
        return
    assert reduce(getattr, rest, scope[first]) is not None


def test_types_have_the_names_of_numba():
    rows = {row[0]: row for row in table("Declarations, launches and types")}
    ours, theirs = next((code(row[0]), code(row[1])) for row in rows.values() if "`u64`" in row[0])
    assert [getattr(scalar, name).numba for name in ours] == theirs
    assert {name for name, value in vars(scalar).items() if isinstance(value, scalar.Scalar)} == set(ours)


def test_kernels_are_compiled_by_numba_cuda():
    """Kernels are compiled by cuda.compile, device functions by cuda.jit, as the page states."""
    source = (REPO / "numflow/cuda/compiler/compile.py").read_text(encoding="utf-8")
    assert "cuda.compile(rewired(kernel.body" in source and "cuda.jit(device=True" in source
    assert compiling.PTX_FOR == (8, 0)
