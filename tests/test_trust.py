"""Caches that others may write, or that are somebody else's, are not used; a pipe in one is not waited for."""

import os
import stat
import sys
import warnings

import pytest

from numflow import kernel_cache, places, trust
from numflow.cpu.memory import array_file
from numflow.cpu.runtime import code_files
from numflow.cpu.weights import prepared
from numflow.formats import kept
from tests.cpu.test_kernel import _forget

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes")
MODULE = "numflow.cpu.measure.clock_kernels"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and none of this process's memory of another."""
    old = os.umask(0)
    monkeypatch.setenv("NUMFLOW_CACHE", str(tmp_path / "a" / "cache"))
    _forget()
    yield tmp_path / "a" / "cache"
    os.umask(old)
    _forget()


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_made_for_this_user_alone_whatever_the_umask(cache):
    folder = kernel_cache.folder(MODULE)
    assert folder.parent == cache / "kernels"
    assert [mode(path) for path in (cache.parent, cache, folder.parent, folder)] == [0o700] * 4
    kept.make_room(cache / "prepared" / "x", 1)
    assert mode(cache / "prepared") == 0o700


@pytest.mark.parametrize("which", ["cache", "kernels", "module"])
@pytest.mark.parametrize("bits", [0o770, 0o707, 0o722, 0o1777])
@pytest.mark.thin(2)
def test_a_folder_that_others_may_write_is_replaced(cache, which, bits):
    folder = kernel_cache.folder(MODULE)
    open_to_all = {"cache": cache, "kernels": cache / "kernels", "module": folder}[which]
    open_to_all.chmod(bits)
    _forget()
    with pytest.warns(UserWarning) as told:
        used = kernel_cache.folder(MODULE)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert f"{open_to_all} may be written by others (mode {bits:04o}; `chmod go-w` ends that)" in str(told[0].message)
    assert cache not in used.parents and mode(used.parent) == 0o700
    open_to_all.chmod(0o755)
    _forget()
    assert kernel_cache.folder(MODULE) == folder  # reading is not writing


def test_what_belongs_to_another_is_not_used_and_what_is_roots_is(cache, monkeypatch):
    folder = kernel_cache.folder(MODULE)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    found = os.stat(folder)
    assert (trust._fault(found) is None) == (owner == 0)
    others = os.stat_result((found.st_mode, 0, 0, 1, owner + 7, 0, 0, 0, 0, 0))
    assert trust._fault(others) == f"belongs to another user ({owner + 7})"
    assert trust._fault(os.stat_result((found.st_mode, 0, 0, 1, 0, 0, 0, 0, 0, 0))) is None


def test_kernels_are_written_for_this_user_alone_and_read_only_then(cache, monkeypatch):
    if not code_files.kept(MODULE):
        pytest.skip("objects of this platform are not kept")
    made = []
    monkeypatch.setattr(code_files, "MachineCode", lambda elf, entry: made.append(elf) or elf)
    monkeypatch.setitem(sys.modules, "numflow.cpu.runtime.compiler",
                        type("compiler", (), {"object_file": staticmethod(lambda compiled: compiled)}))
    code_files.save(MODULE, "now", b"code")
    path = kernel_cache.folder(MODULE) / "now.o"
    assert mode(path) == 0o600 and code_files.load(MODULE, "now") == b"code"
    for bits in (0o620, 0o602, 0o666):
        path.chmod(bits)
        with pytest.warns(UserWarning, match=r"now\.o may be written by others \(mode 06.*\): it is made again"):
            assert code_files.load(MODULE, "now") is None
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.warns(UserWarning, match=r"now\.o is no file: it is made again"):
        assert code_files.load(MODULE, "now") is None  # and does not wait for a writer


def test_a_pipe_among_numbas_own_files_is_not_opened(cache):
    folder = kernel_cache.folder(MODULE)
    (folder / "fine.nbi").touch(0o666)  # Numba writes so; nobody else can enter the folder
    _forget()
    assert kernel_cache.folder(MODULE) == folder
    os.mkfifo(folder / "f.nbi")
    _forget()
    with pytest.warns(UserWarning, match=r"f\.nbi is no file"):
        assert kernel_cache.folder(MODULE) != folder


def test_packed_weights_are_read_from_files_of_this_user_alone(cache, monkeypatch):
    import numpy as np

    values = np.arange(100, dtype=np.uint8)
    path = cache / "prepared" / "x"
    places.make(path.parent)
    array_file.write(path, {"a": values})
    assert mode(path) == 0o600
    np.testing.assert_array_equal(array_file.ArrayFile(path).read("a", 100, 1), values)
    path.chmod(0o660)
    with pytest.warns(UserWarning, match="may be written by others"):
        assert array_file.ArrayFile(path).read("a", 100, 1) is None
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match="is no file"):
        assert array_file.ArrayFile(path).read("a", 100, 1) is None
    path.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="prepared may be written by others .*: prepared weights there are not used"):
        assert not trust.usable(prepared.folder(), "prepared weights")


def test_what_is_not_there_is_nobodys(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trust.why_not(tmp_path / "none") is None and not trust.readable(tmp_path / "none")
