"""Modules of kernels: their names, and that a `Code` finds the same kernels in sources as importing does."""

import ast
import inspect
import pkgutil
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

import numflow.cpu
from numflow import kernel_cache
from numflow.cpu.runtime import kernel as kernel_module
from numflow.cpu.runtime.kernel import MOST_BY_POSITION, Code, Kernel

MODULES = [import_module(found.name) for found in pkgutil.walk_packages(numflow.cpu.__path__, "numflow.cpu.")]
CODES = {f"{module.__name__}.{name}": value for module in MODULES for name, value in vars(module).items()
         if isinstance(value, Code)}


def kernels_in(module) -> dict[str, Kernel]:
    """The kernels that a module defines."""
    return {value.name: value for value in vars(module).values()
            if isinstance(value, Kernel) and value.module == module.__name__}


def test_kernels_are_in_modules_of_kernels():
    homes = {module.__name__ for module in MODULES if kernels_in(module)}
    homes |= {home for code in CODES.values() for home in code.modules}
    assert len(homes) >= 15
    assert [home for home in sorted(homes) if not home.endswith("_kernels")] == []
    folders = [home.rpartition(".")[2] for home in homes]  # folders of compiled kernels have this name
    assert sorted(folders) == sorted(set(folders))


def test_every_kernel_has_a_binder():
    named = {home for code in CODES.values() for home in code.modules}
    assert [module.__name__ for module in MODULES if kernels_in(module) and module.__name__ not in named] == []


@pytest.mark.parametrize("binder", CODES)
def test_a_code_has_the_kernels_of_its_modules(binder):
    code = CODES[binder]
    found = {name: kernel for home in code.modules for name, kernel in kernels_in(import_module(home)).items()}
    assert set(code.kernels()) == set(found) | set(code.stamps)
    for name, kernel in code.kernels().items():
        assert len(inspect.signature(kernel.fn).parameters) == 3
        assert (kernel.name, kernel.fn.__module__) == (name, kernel.module)
        if name in found:
            assert kernel.fn is found[name].fn


def positions(module) -> list[int]:
    """Positions of arguments that a module's code reads by integers, or by names of integers."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    reads = [node.args[1] for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2
             and ast.unparse(node.func) in ("i64", "f64") and ast.unparse(node.args[0]) == "args"]
    found = [read.value if isinstance(read, ast.Constant) else vars(module).get(getattr(read, "id", ""))
             for read in reads]
    return [position for position in found if isinstance(position, int)]


def test_arguments_of_large_kernels_have_names():
    """`Call.of` refuses more than 12 arguments; so kernels read arguments above 12 by slots only."""
    found = {module.__name__: positions(module) for module in MODULES}
    assert sum(map(len, found.values())) > 50
    assert {name: beyond for name, at in found.items() if (beyond := [p for p in at if p >= MOST_BY_POSITION])} == {}


def test_stamps_are_known_by_factory_and_constants():
    files = [kernel.file for code in CODES.values() for kernel in code.kernels().values() if kernel.name in code.stamps]
    assert len(files) == len(set(files)) > 150
    assert "linear-b4_super-1-False" in files and "pack_type-Q4_K" in files


def test_a_blank_line_under_the_decorator(tmp_path, monkeypatch):
    source = tmp_path / "some_kernels.py"
    source.write_text("@kernel\n\ndef _late(args, thread, n_threads):\n    pass\n\n\ndef factory(n):\n    pass\n")
    monkeypatch.setattr(kernel_cache, "source_of", lambda module: source)
    code = Code("numflow.cpu.some_kernels", stamps={"of_two": ("factory", (2,))})
    assert set(code.kernels()) == {"late", "of_two"}
    with pytest.raises(KeyError, match="gone"):
        Code("numflow.cpu.some_kernels", stamps={"of_three": ("gone", (3,))}).kernel("late")


def test_devices_that_look_at_once_find_all_kernels(monkeypatch):
    """Devices of a plan are threads: none may use a table that another is still filling."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(module):
        yield "_first", 1, True
        begun.set()
        assert go_on.wait(60)
        yield "_second", 9, True

    monkeypatch.setattr(kernel_module, "_functions", slow)
    code = Code("numflow.cpu.some_kernels")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(code.kernel, "first")
        assert begun.wait(60)
        two = pool.submit(code.kernel, "second")
        with pytest.raises(TimeoutError):
            two.result(0.05)
        go_on.set()
        assert (one.result(60).name, two.result(60).name) == ("first", "second")
        assert code.kernel("first") is one.result()
