"""64-bit Arm: kernels compiled for Arm, run in an emulator, give the same bits as on this machine."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from numflow import kernel_cache
from numflow.cpu.simd import isa as simd_isa
from numflow.formats.types import TYPES
from numflow.quant.inferflow import INFERFLOW_SCHEMES
from numflow.quant.stored import STORED
from tests.conftest import REPO
from tests.cpu.isa_digest import digest, one_of_each

# Environments of processors with and without dot products of bytes.
PROCESSORS = {isa: {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features} for isa, cpu, features in (
    ("neon", "neoverse-n1", "+neon,+dotprod"), ("plain", "cortex-a72", "+neon"))}
emulated = pytest.mark.skipif(find_spec("unicorn") is None or not sys.platform.startswith("linux"),
                              reason="no emulator (unicorn), or a system that tests/cpu/arm.py does not know")


def _run(isa, *arguments):
    done = subprocess.run([sys.executable, "-m", "tests.cpu.arm", *arguments], cwd=REPO, text=True, check=False,
                          env=os.environ | PROCESSORS[isa], capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _check(isa, cases):
    found = _run(isa, "tests.cpu.isa_digest", *(":".join(case) for case in cases))
    assert found == [isa, *(digest(*case) for case in cases)]


@emulated
@pytest.mark.merge
def test_same_bits():
    _check("neon", [("q3h", "int8")])


@emulated
@pytest.mark.merge
def test_dots_of_the_largest_numbers():
    assert _run("neon", "tests.cpu.dots") == ["neon"]


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("isa", PROCESSORS)
def test_same_bits_of_networks(isa):
    """Attention on floats and on codes, norms, activations, rotary embeddings and steps fused with matrices."""
    _check(isa, [("network", "int8", "1"), ("network", "f32", "1"),
                 *(("cache", kind, "1") for kind in ("bf16", "q8", "q3h"))])


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("isa", PROCESSORS)
@pytest.mark.parametrize("mode", ["int8", "f32"])
def test_same_bits_for_every_kind_of_type(isa, mode):
    """The types of isa_digest.one_of_each.

    Without Inferflow's types that a test has to encode: the encoder is Arm code as well, and is not emulated.
    """
    kinds = [kind for kind in STORED if (kind not in INFERFLOW_SCHEMES or kind == "q4_b16")
             and (mode == "f32" or TYPES[kind].block > 1)]
    _check(isa, [(kind, mode) for kind in one_of_each(kinds)])


@pytest.mark.parametrize(("line", "system", "features"), [
    ("Features\t: fp asimd evtstrm crc32 atomics asimddp", "linux", {"neon", "dotprod"}),  # Graviton 2
    ("Features\t: fp asimd evtstrm crc32", "linux", {"neon"}),
    ("", "darwin", {"neon", "dotprod"})])
def test_what_a_processor_has(line, system, features, monkeypatch, tmp_path):
    """Features from Linux's names, and of Apple's processors; cached code is for these features only."""
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t: fpu avx512f neon\n{line}\n")
    monkeypatch.setattr(kernel_cache, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(kernel_cache, "ARM", True)
    flags = kernel_cache.processor_flags.__wrapped__()
    assert " ".join(flags) in line and bool(flags) == bool(line)
    monkeypatch.setattr(kernel_cache, "processor_flags", lambda: flags)
    monkeypatch.setattr(kernel_cache, "setting", lambda name: None)
    monkeypatch.setattr(kernel_cache.sys, "platform", system)
    assert kernel_cache.features() & {"neon", "dotprod"} == features
    assert simd_isa.isa.__wrapped__() == ("neon" if "dotprod" in features else "plain")
