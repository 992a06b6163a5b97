"""Kernels: their arguments, and the folder of compiled kernels."""

import os
import signal
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from numflow import kernel_cache, places
from numflow.cpu.runtime.access import (
    f32_bits,
    f32_from_bits,
    f32_ptr,
    f64,
    i8_ptr,
    i32_ptr,
    i64,
    share,
    u8_ptr,
    u16_ptr,
)
from numflow.cpu.runtime.kernel import MOST_BY_POSITION, Call, compile_seconds, kernel, on_compile, slots


@kernel
def _arguments(args, thread, n_threads):
    """One argument of each kind: bytes, int8, uint16, int32, a float in the arguments, a float32 by its bits."""
    y = i64(args, 0)
    f32_ptr(y)[0] = u8_ptr(i64(args, 1))[1] + i8_ptr(i64(args, 2))[1] + u16_ptr(i64(args, 3))[1]
    f32_ptr(y)[1] = f64(args, 4) * i64(args, 5)
    f32_ptr(y)[2] = f32_from_bits(f32_bits(np.float32(2.5)) + np.int32(1 << 23))
    i32_ptr(y)[3] = i32_ptr(y)[3] + thread


def test_arguments():
    y = np.zeros(4, np.float32)
    y.view(np.int32)[3] = -7
    u8, i8, u16 = np.array([0, 255], np.uint8), np.array([0, -100], np.int8), np.array([0, 65535], np.uint16)
    call = Call.of(None, _arguments, y, u8, i8, u16, 0.5, np.int64(-3))
    assert call.args.dtype == np.int64
    assert all(a is b for a, b in zip(call.keep, (y, u8, i8, u16), strict=True))
    call(thread=5)
    assert y[:3].tolist() == [65690.0, -1.5, 5.0]
    assert y.view(np.int32)[3] == -2
    assert _arguments.name == "arguments"
    assert _arguments.location.startswith("tests/cpu/test_kernel.py:")


def test_arrays_with_gaps_are_no_arguments():
    with pytest.raises(ValueError, match="C-contiguous"):
        Call.of(None, _arguments, np.zeros((4, 4))[:, :2])


@kernel
def _named(args, thread, n_threads):
    """y = x * factor, by slots."""
    f32_ptr(i64(args, _SLOTS.y))[0] = f32_ptr(i64(args, _SLOTS.x))[0] * f64(args, _SLOTS.factor)


_SLOTS = slots("x y factor")


def test_arguments_by_name():
    x, y = np.full(1, 3, np.float32), np.zeros(1, np.float32)
    call = Call.named(None, _named, _SLOTS, factor=0.5, y=y, x=x, keep=(call_me := [1],), joined=True)
    assert call.args.tolist() == Call.of(None, _named, x, y, 0.5).args.tolist()
    assert call.joined and call.keep[0] is call_me and call.keep[1] is x and call.keep[2] is y
    call()
    assert y[0] == 1.5


@pytest.mark.parametrize(("values", "said"), [
    ({"x": 1, "y": 2}, "kernel named: no value for factor"),
    ({"x": 1, "y": 2, "factor": 3.0, "bias": 4}, "kernel named: no slot bias"),
    ({"x": 1, "why": 2, "factors": 3.0}, "kernel named: no value for factor, y; no slot factors, why")])
def test_every_slot_has_a_value_and_every_value_a_slot(values, said):
    with pytest.raises(TypeError, match=f"^{said}$"):
        Call.named(None, _named, _SLOTS, **values)


def test_many_arguments_have_names():
    assert len(Call.of(None, _named, *range(MOST_BY_POSITION)).args) == MOST_BY_POSITION == 12
    with pytest.raises(TypeError, match="13 arguments by position; more than 12 are given by name"):
        Call.of(None, _named, *range(MOST_BY_POSITION + 1))


@pytest.mark.parametrize(("n", "threads"), [(0, 3), (1, 4), (10, 3), (7, 7), (1000, 6)])
def test_shares_are_even_and_complete(n, threads):
    shares = [share(n, thread, threads) for thread in range(threads)]
    assert shares[0][0] == 0
    assert shares[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(shares))
    sizes = [end - begin for begin, end in shares]
    assert max(sizes) - min(sizes) <= 1


def test_listeners_hear_of_a_kernel_once():
    seen, before = [], sum(compile_seconds.values())

    @kernel
    def _fresh(args, thread, n_threads):
        """Nothing."""

    on_compile.append(lambda *event: seen.append(event))
    try:
        assert _fresh.address == _fresh.address
    finally:
        on_compile.pop()
    ((name, seconds, loaded),) = seen
    assert name == "fresh"
    assert seconds > 0
    assert loaded in (True, False)
    assert sum(compile_seconds.values()) == pytest.approx(before + seconds)


def test_an_interrupt_waits_for_the_compiler():
    @kernel
    def _late(args, thread, n_threads):
        """Nothing."""

    def interrupt(*event):
        signal.raise_signal(signal.SIGINT)
        seen.append(event)  # reached: nothing is raised inside the block

    seen, before = [], signal.getsignal(signal.SIGINT)
    on_compile.append(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            _late.prepare()
    finally:
        on_compile.pop()
    assert signal.getsignal(signal.SIGINT) is before
    assert len(seen) == 1
    _late(0)
    assert len(seen) == 1  # the file was complete


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package numflow.cpu whose modules import each other in every possible way, and a folder for kernels."""
    cpu = tmp_path / "numflow" / "cpu"
    cpu.mkdir(parents=True)
    for path, text in {"__init__.py": "", "cpu/__init__.py": "", "cpu/a.py": "from numflow.cpu import b, math as m\n",
                       "cpu/b.py": "def f():\n    from numflow.cpu.c import (  # late\n        one,\n        two)\n",
                       "cpu/c.py": "import numflow.cpu.d\n", "cpu/d.py": "", "cpu/math.py": "", "cpu/e.py": ""}.items():
        (tmp_path / "numflow" / path).write_text(text)
    monkeypatch.setattr(kernel_cache, "_PACKAGE", tmp_path / "numflow")
    monkeypatch.setenv("NUMFLOW_CACHE", str(tmp_path / "cache"))
    _forget()
    yield cpu
    _forget()


def _forget():
    for function in (kernel_cache.folder, kernel_cache.read, kernel_cache._imported, kernel_cache._modules,
                     kernel_cache._writable_root, kernel_cache.prune):
        function.cache_clear()


def test_a_folder_depends_on_all_sources_a_kernel_is_made_of(package):
    first = kernel_cache.folder("numflow.cpu.a")
    assert first.is_dir()
    assert first.parent == package.parent.parent / "cache" / "kernels"
    assert first.name.startswith("a-")
    for name in ("a", "b", "c", "d", "math"):
        _forget()
        before = kernel_cache.folder("numflow.cpu.a")
        with (package / f"{name}.py").open("a") as file:
            file.write("# changed\n")
        _forget()
        assert kernel_cache.folder("numflow.cpu.a") != before, name
    _forget()
    before = kernel_cache.folder("numflow.cpu.a")
    (package / "e.py").write_text("# no import leads here")
    _forget()
    assert kernel_cache.folder("numflow.cpu.a") == before


def test_kernels_outside_of_the_package_depend_on_what_they_use_of_it(package, monkeypatch):
    outside = package.parent.parent / "outside.py"
    outside.write_text("from numflow.cpu.c import one\n")
    monkeypatch.setitem(sys.modules, "outside", SimpleNamespace(__file__=str(outside)))
    found = {kernel_cache.folder("outside")}
    for path in (outside, package / "c.py", package / "d.py"):
        path.write_text(path.read_text() + "# changed\n")
        _forget()
        found.add(kernel_cache.folder("outside"))
    (package / "a.py").write_text("# not imported\n")
    _forget()
    assert kernel_cache.folder("outside") in found
    assert len(found) == 4


def test_old_folders_are_removed(package):
    used, old = kernel_cache.folder("numflow.cpu.a"), kernel_cache.folder("numflow.cpu.e")
    month = time.time() - 40 * 86400
    os.utime(old, (month, month))
    kernel_cache.prune()
    assert used.exists()
    assert not old.exists()


def test_a_folder_that_cannot_be_written_is_replaced_with_a_warning(package, monkeypatch):
    (package / "file").write_text("")
    monkeypatch.setenv("NUMFLOW_CACHE", str(package / "file"))
    _forget()
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept in .*NUMFLOW_CACHE"):
        path = kernel_cache.folder("numflow.cpu.a")
    assert path.is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_cache.folder("numflow.cpu.e")


@pytest.mark.parametrize(("platform", "variables", "expected"), [
    ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/numflow/kernels"), ("linux", {}, "~/.cache/numflow/kernels"),
    ("darwin", {}, "~/Library/Caches/numflow/kernels"), ("win32", {"LOCALAPPDATA": "/l"}, "/l/numflow/kernels"),
    ("linux", {"NUMFLOW_CACHE": "/n"}, "/n/kernels"), ("linux", {"NUMFLOW_HOME": "/h"}, "/h/kernels"),
    ("linux", {"NUMFLOW_HOME": "/h", "NUMFLOW_CACHE": "/n"}, "/n/kernels"),
    ("linux", {"NUMFLOW_HOME": "/h", "NUMFLOW_CACHE": ""}, "/h/kernels")])
def test_root(monkeypatch, platform, variables, expected):
    for name in ("NUMFLOW_CACHE", "NUMFLOW_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kernel_cache.sys, "platform", platform)
    assert kernel_cache.root() == Path(expected).expanduser()


@pytest.fixture
def no_home(monkeypatch):
    """A user without a home folder, as in a container started with a user id only."""
    for name in ("NUMFLOW_CACHE", "NUMFLOW_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(places.os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize("platform, base", [("linux", "~/.cache"), ("darwin", "~/Library/Caches"),
                                            ("win32", "~/AppData/Local")])
def test_who_has_no_home_is_told(no_home, monkeypatch, platform, base):
    monkeypatch.setattr(places.sys, "platform", platform)
    with pytest.raises(OSError, match="this user has no home folder; NUMFLOW_HOME names a place") as told:
        places.home()
    assert told.value.filename == base


def test_kernels_of_who_has_no_home_are_kept_for_the_process(package, no_home):
    _forget()
    with pytest.warns(UserWarning, match=r"compiled kernels cannot be kept in ~ \(this user has no home folder"):
        assert kernel_cache.folder("numflow.cpu.a").is_dir()


def test_home_is_named_by_a_path_that_ends_elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMFLOW_CACHE", raising=False)
    monkeypatch.setenv("NUMFLOW_HOME", str(tmp_path / "Zuhause für Modelle 模型"))
    assert places.cache("kernels") == tmp_path / "Zuhause für Modelle 模型" / "kernels"
    places.make(places.cache("kernels"))
    assert places.cache("kernels").is_dir()
