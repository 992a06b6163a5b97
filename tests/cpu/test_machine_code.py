"""Kernels from disk without a compiler: object files linked by numflow run as Numba's do, damaged files are refused."""

import struct
import subprocess
import sys

import numpy as np
import pytest

from numflow.cpu.runtime import code_files, machine_code, symbols
from numflow.cpu.runtime.kernel import HEADER_FIELDS, Call, Code, Kernel
from numflow.cpu.runtime.machine_code import MachineCode, UnknownCodeError
from tests.conftest import REPO

pytestmark = pytest.mark.skipif(not machine_code.supported(), reason="objects of this platform are not known")
# A kernel that computes with vectors, and one that calls the C library's cos and sin.
KERNELS = [("numflow.cpu.elementwise.act_kernels", "act"), ("numflow.cpu.elementwise.rope_kernels", "rope_angles")]


def elf_of(module, name):
    """The kernel's object file, compiled now if missing."""
    Code(module).kernel(name).prepare()
    return (code_files.kernel_cache.folder(module) / f"{name}.o").read_bytes()[:-code_files._CHECKSUM]


def arguments(name):
    """(args, y): 20 values for `kernel`, or the angles of 2 tokens."""
    header, y = np.zeros(HEADER_FIELDS, np.int64), np.zeros((2, 20), np.float32)
    header[0], x = 2, np.linspace(-3, 3, 20, dtype=np.float32)
    if name == "act":  # silu
        rows = np.stack([x, -x])
        return (header, 0, 20, y, 20, rows, 20, rows, 20, 5, 0.0, 0.0), y
    positions = np.array([3, 4000], np.int32)
    header[5] = positions.ctypes.data
    return (header, 0, np.abs(x[:10]), 10, y, 20, 1.0, positions), y


@pytest.mark.parametrize(("module", "name"), KERNELS)
def test_the_same_bits_as_from_numba(module, name):
    results = []
    for code in (MachineCode(elf_of(module, name), "cfunc."), compiled(module, name)):
        values, y = arguments(name)
        kernel = Kernel(module, name, 1)
        kernel._code, kernel._call = code, Kernel.prototype(code.address)
        Call.of(None, kernel, *values)()
        results.append(y.copy())
    assert results[0].any()
    np.testing.assert_array_equal(*results)


def compiled(module, name):
    from numflow.cpu.runtime.compiler import compile_kernel

    return compile_kernel(Kernel(module, name, 1).fn, keep=False)[0]


def test_a_start_with_all_kernels_on_disk_imports_no_compiler():
    for module, name in KERNELS:
        elf_of(module, name)
    lines = ["import sys", "from numflow.cpu.program import Program", "from numflow.cpu.runtime.kernel import Code",
             *(f"assert Code({module!r}).kernel({name!r}).address" for module, name in KERNELS),
             "print(sorted({'numba', 'llvmlite'} & set(sys.modules)))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=REPO, capture_output=True, text=True,
                          check=True)
    assert done.stdout.strip() == "[]"


def test_broken_files_are_made_anew(tmp_path, monkeypatch):
    module, name = KERNELS[0]
    monkeypatch.setattr(code_files, "_path", lambda module, name: tmp_path / f"{name}.o")
    assert code_files.load(module, name) is None
    code_files.save(module, name, compiled(module, name))
    assert code_files.load(module, name) is not None
    whole = (tmp_path / f"{name}.o").read_bytes()
    assert whole == code_files._with_checksum(whole[:-code_files._CHECKSUM])
    for broken in (b"", whole[:-1], whole[:100] + b"\xff" + whole[101:]):
        (tmp_path / f"{name}.o").write_bytes(broken)
        assert code_files.load(module, name) is None


def test_a_full_disk_is_told_and_nothing_half_stays(tmp_path, monkeypatch):
    module, name = "numflow.cpu.elementwise.norm_kernels", "rms_norm"
    monkeypatch.setattr(code_files, "_path", lambda module, name: tmp_path / f"{name}.o")

    def full(path, target):
        assert path.exists()
        raise OSError(28, "No space left on device")

    code = compiled(module, name)
    monkeypatch.setattr(code_files.Path, "replace", full)
    with pytest.warns(UserWarning, match="cannot be kept in .*No space left"):
        code_files.save(module, name, code)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_understood_is_refused():
    elf = elf_of(*KERNELS[0])
    with pytest.raises(UnknownCodeError, match="no function 'other'"):
        MachineCode(elf, "other")
    for broken in (b"\x7fELF", b"MZ" + elf[2:], elf[:18] + struct.pack("<H", 183) + elf[20:], elf[:len(elf) // 2]):
        with pytest.raises(UnknownCodeError, match="not an object file"):
            MachineCode(broken, "cfunc.")


def test_relocations_out_of_reach_are_refused():
    code = MachineCode(elf_of(*KERNELS[1]), "cfunc.")
    with pytest.raises(UnknownCodeError, match="relocation 77"):
        code._relocate(0, 77, 1, 0)
    with pytest.raises(UnknownCodeError, match="too far away"):
        code._relocate(0, machine_code._ADDRESS32, next(iter(code._offsets)), 1 << 40)


def test_symbols_have_addresses():
    assert symbols.address_of("cos") != symbols.address_of("sin")
    assert symbols.address_of("numba_unpickle") == symbols.address_of("abort")
    assert symbols.address_of("numflow_yield")
    with pytest.raises(KeyError):
        symbols.address_of("there_is_no_such_function")


def test_other_peoples_kernels_are_left_to_numba():
    assert code_files.load("tests.cpu.test_kernel", "arguments") is None
