"""AVX-512 and AVX-VNNI: kernels compiled for such processors, run in an emulator, give the same bits as here."""

import os
import platform
import subprocess
import sys
from importlib.util import find_spec

import pytest

from numflow.formats.types import TYPES
from numflow.quant.inferflow import INFERFLOW_SCHEMES
from numflow.quant.stored import STORED
from tests.conftest import REPO
from tests.cpu.isa_digest import digest, one_of_each
from tests.cpu.x86 import PROCESSORS

pytestmark = pytest.mark.skipif(
    find_spec("bochscpu") is None or not sys.platform.startswith("linux") or platform.machine() != "x86_64",
    reason="no emulator (bochscpu-python), or a system that tests/cpu/x86.py does not know")
NETWORKS = [("network", "int8", "1"), ("network", "f32", "1"),
            *(("cache", kind, "1") for kind in ("bf16", "q8", "q3h", "q2"))]


def _run(isa, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU_")}
    done = subprocess.run([sys.executable, "-m", "tests.cpu.x86", isa, *arguments], cwd=REPO, text=True, check=False,
                          env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _check(isa, cases):
    found = _run(isa, "tests.cpu.isa_digest", *(":".join(case) for case in cases))
    assert found == [isa, *(digest(*case) for case in cases)]


@pytest.mark.parametrize("isa", PROCESSORS)
@pytest.mark.merge
def test_same_bits(isa):
    _check(isa, [("Q4_K", "int8"), ("q3h", "int8"), ("F16", "f32")])


@pytest.mark.parametrize("isa", PROCESSORS)
@pytest.mark.thin(2)
def test_dots_of_the_largest_numbers(isa):
    assert _run(isa, "tests.cpu.dots") == [isa]


@pytest.mark.slow
@pytest.mark.parametrize("isa", PROCESSORS)
def test_same_bits_of_networks(isa):
    """Attention on floats and on codes, norms, activations, rotary embeddings and steps fused with matrices."""
    _check(isa, NETWORKS)


@pytest.mark.slow
@pytest.mark.parametrize("isa", PROCESSORS)
@pytest.mark.parametrize("mode", ["int8", "int16", "f32"])
def test_same_bits_for_every_kind_of_type(isa, mode):
    """The types of isa_digest.one_of_each, without Inferflow's types that a test has to encode, as in test_arm."""
    kinds = [kind for kind in STORED if (kind not in INFERFLOW_SCHEMES or kind == "q4_b16")
             and (mode == "f32" or TYPES[kind].block > 1)]
    _check(isa, [(kind, mode) for kind in one_of_each(kinds)])
