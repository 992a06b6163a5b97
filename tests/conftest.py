"""What every test may use: where reference material and real models are, if they are there at all.

The suite passes without either: what needs them skips. `NUMFLOW_SHARED` names the folder of published fixtures and
data (else `../shared` beside the repository), `NUMFLOW_MODELS` a folder of real models (else `../peers/models`).
"""

import gc
import os
import signal
import zlib
from pathlib import Path

import hypothesis
import pytest

from numflow import places
from numflow.cpu.runtime.cores import default_threads
from tests.shares import share

REPO = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("NUMFLOW_SHARED") or REPO.parent / "shared")
WHOLE = "NUMFLOW_WHOLE_SUITE"  # what the processes of a shared run know of it
MATRIX_THREADS = "OPENBLAS_NUM_THREADS"
MOST_PROCESSES = 8  # that share the suite; each collects all of it

# A shell starts what runs in its background with interrupts ignored; tests, and commands they start, are to hear them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests have homes of their own; compiled kernels are shared with the user's.
os.environ["NUMFLOW_CACHE"] = str(places.cache("kernels").parent)

# Tests are not to fill the user's cache with packed weights; tests/cpu/test_prepared.py has a folder of its own.
os.environ["NUMFLOW_PREPARED"] = "0"

# Each process of a shared run has a core, where it compiles kernels by itself.
os.environ["NUMFLOW_COMPILERS"] = "1"

# Every run draws the same examples, and none are kept: the tree may be one that cannot be written.
hypothesis.settings.register_profile("numflow", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("numflow")

# Garbage is looked for less often, and not among all tests: compilers leave so many objects that it took a sixth of the
# time.
gc.set_threshold(100_000, 10, 10)


def pytest_addoption(parser):
    parser.addoption("--share", type=share, default=(0, 1), metavar="K/N",
                     help="of the slow tests, and those of --rest, only a share, by their names: 0/4 is one of four")
    parser.addoption("--rest", action="store_true",
                     help="what a run of the whole suite leaves out: tests marked merge, most cases of thin ones")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads these options after this
def pytest_cmdline_main(config):
    """The whole default suite is shared out among processes, one for each core, and leaves out what --rest runs; files
    that are named have one process, and run whole."""
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ:  # this is one of them, or a test of one started it
        option.whole = WHOLE in os.environ
        return
    option.whole = option.markexpr.startswith("not slow") and config.args_source is not pytest.Config.ArgsSource.ARGS
    if option.whole:
        os.environ[WHOLE] = "1"
    if option.whole and getattr(option, "numprocesses", 0) is None and not option.usepdb and not option.collectonly:
        option.numprocesses, option.dist = min(default_threads(), MOST_PROCESSES), "worksteal"
        os.environ.setdefault(MATRIX_THREADS, "1")  # each process has a core; NumPy's threads wait by spinning


def pytest_collection_modifyitems(config, items):
    number, count = config.getoption("--share")
    rest, only_rest = left_to_a_merge(items), config.getoption("--rest")
    left = [item for item in items
            if (only_rest and item not in rest) or (config.option.whole and not only_rest and item in rest)
            or ((only_rest or item.get_closest_marker("slow")) and zlib.crc32(item.nodeid.encode()) % count != number)]
    if left:
        config.hook.pytest_deselected(items=left)
        out = set(left)
        items[:] = [item for item in items if item not in out]


def left_to_a_merge(items) -> set:
    """Tests that a run of the whole suite leaves to a merge: those marked `merge`, and the cases of a function marked
    `thin(n)` but one in n, at least the first. They are drawn by their parameters' names alone, so that tests with the
    same cases have the same ones left, and compile the same kernels."""
    left, thin = set(), {}
    for item in items:
        if item.get_closest_marker("merge"):
            left.add(item)
        elif mark := item.get_closest_marker("thin"):
            thin.setdefault((item.nodeid.partition("[")[0], *mark.args), []).append(item)
    for (_, n), cases in thin.items():
        kept = {case for case in cases if zlib.crc32(case.nodeid.partition("[")[2].encode()) % n == 0} or {cases[0]}
        left.update(case for case in cases if case not in kept)
    return left


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def _existing(variable: str, default: Path, parts: tuple[str, ...]) -> Path:
    path = Path(os.environ.get(variable) or default).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {'/'.join(parts) or default.name}; {variable} names its folder", allow_module_level=True)
    return path


def shared(*parts: str) -> Path:
    """A path below the folder of reference material; skips the test (or whole module) where it does not exist.

    Some of the fixtures are in tests/golden/files, and so always there.
    """
    here = REPO / "tests" / "golden" / "files"
    if parts[:1] == ("fixtures",) and len(parts) > 1 and here.joinpath(*parts[1:]).exists():
        return here.joinpath(*parts[1:])
    return _existing("NUMFLOW_SHARED", SHARED, parts)


def real_model(*parts: str) -> Path:
    """A path below the folder of real models; skips the test (or whole module) where it does not exist."""
    return _existing("NUMFLOW_MODELS", REPO.parent / "peers" / "models", parts)


@pytest.fixture
def models_dir() -> Path:
    """The folder of real models."""
    return real_model()


@pytest.fixture(autouse=True)
def _offline(request, monkeypatch):
    """No test reaches the network unless it is marked `network`."""
    if request.node.get_closest_marker("network") is None:
        monkeypatch.setenv("NUMFLOW_OFFLINE", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder of a small chat model with random weights, the base of adapters."""
    from tests.server.tiny import write_chat_model

    return write_chat_model(tmp_path_factory.mktemp("base"))
