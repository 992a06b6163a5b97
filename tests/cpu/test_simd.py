"""Every instruction set gives the same bits; on a machine with AVX-512 the machine code is as expected."""

import os
import re
import subprocess
import sys

import numba
import pytest

from numflow.cpu.linear.activations import INT8
from numflow.cpu.linear.linear import kernel_named
from numflow.cpu.runtime.compiler import FASTMATH
from numflow.cpu.simd.isa import FORCED, isa
from numflow.formats.types import TYPES
from numflow.quant.stored import STORED
from tests.conftest import REPO
from tests.cpu import dots
from tests.cpu.isa_digest import digest, one_of_each

x86_with_avx2 = pytest.mark.skipif(isa() == "plain", reason="this machine lacks AVX2")


def _run(name, *arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=REPO, env=os.environ | FORCED[name], text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _check(name, cases):
    found = _run(name, "-m", "tests.cpu.isa_digest", *(f"{kind}:{mode}" for kind, mode in cases)).split()
    assert found == [name, *(digest(kind, mode) for kind, mode in cases)]


@x86_with_avx2
@pytest.mark.parametrize("name", ["avx2", "plain"])
@pytest.mark.merge
def test_same_bits(name):
    _check(name, [("q3h", "int8"), ("F16", "f32"), ("F16", "bf16")])


def test_dots_of_the_largest_numbers():
    """No sum overflows the bits of its accumulator."""
    dots.check()


@x86_with_avx2
@pytest.mark.parametrize("name", ["avx2", "plain"])
@pytest.mark.merge
def test_dots_of_the_largest_numbers_with_less(name):
    assert _run(name, "-m", "tests.cpu.dots").split() == [name]


@pytest.mark.slow
@x86_with_avx2
@pytest.mark.parametrize("name", ["avx2", "plain"])
def test_same_codes(name):
    """Quantisation gives the same codes with other rounding instructions."""
    _check(name, [("stored", "q2"), ("stored", "q3h"), ("stored", "q8"), ("stored", "q3h_b64t1")])


@pytest.mark.slow
@x86_with_avx2
@pytest.mark.parametrize("name", ["avx2", "plain"])
def test_same_bits_of_networks(name):
    """Attention, norms, activations, rotary embeddings and steps fused with matrices."""
    _check(name, [("network", "int8"), ("network", "f32"), ("cache", "bf16")])


@pytest.mark.slow
@x86_with_avx2
@pytest.mark.parametrize("name", ["avx2", "plain"])
def test_same_bits_for_every_kind_of_type(name):
    kinds = one_of_each(STORED)
    _check(name, [(kind, "f32") for kind in kinds] + [(kind, "int8") for kind in kinds if TYPES[kind].block > 1] + [
        ("q3h+2%", "int8")])


_ASSEMBLY = """
import sys
import numba
from numflow.cpu.linear.activations import INT8
from numflow.cpu.linear.linear import kernel_named
from numflow.cpu.simd.isa import FORCED, isa
compiled = numba.cfunc("void(int64, int64, int64)")(kernel_named("linear", sys.argv[1], INT8).fn)
print(isa(), compiled._library.get_asm_str())
"""


@pytest.mark.slow
@x86_with_avx2
def test_avx2_keeps_what_it_needs_in_registers():
    """Decoding pairs for one token, the shortest loop, spills at most two of 16 registers."""
    lines = _run("avx2", "-c", _ASSEMBLY, "q3h").splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:", line)}
    jumps = ((i, re.search(r"\tj\w+\s+(\.L\w+)", line)) for i, line in enumerate(lines))
    loops = (lines[labels[jump[1]]:i] for i, jump in jumps if jump and labels.get(jump[1], i) < i)
    shortest = min((loop for loop in loops if any("vpmaddubsw" in line for line in loop)), key=len)
    assert sum("vpmaddubsw" in line for line in shortest) == 16
    assert sum(bool(re.search(r"vmov\w+\s+%ymm\d+, -?\d*\(%rsp", line)) for line in shortest) <= 2


@pytest.mark.slow
@pytest.mark.skipif(isa() == "plain", reason="not an x86 machine with AVX2")
def test_avxvnni_is_encoded_for_it():
    """Most machines cannot run this code, so only the machine code is checked."""
    assembly = _run("avxvnni", "-c", _ASSEMBLY, "b4_scale")
    assert assembly.startswith("avxvnni")
    assert len(re.findall(r"\{vex\}\s+vpdpbusd", assembly)) >= 8
    assert "zmm" not in assembly and "vpmaddubsw" not in assembly


@pytest.mark.skipif(isa() != "avx512", reason="this machine lacks AVX-512 VNNI")
@pytest.mark.parametrize(("name", "dots"), [("b4_base", 8 * 15), ("b8_scale", 8 * 15)])
@pytest.mark.thin(2)
def test_avx512_code(name, dots):
    """One dot product per column group and token, activations broadcast from memory, no spills to the stack."""
    assembly = numba.cfunc("void(int64, int64, int64)", fastmath=FASTMATH, error_model="numpy")(
        kernel_named("linear", name, INT8).fn)._library.get_asm_str()
    assert len(re.findall(r"vpdpbusd\s.*\{1to16\}", assembly)) == dots
    assert not re.search(r"vmov\w+\s+%zmm\d+, -?\d*\(%rsp", assembly)
