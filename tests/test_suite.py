"""How the suite itself behaves: where nothing can be written, and when a test hangs."""

import subprocess
import sys

import hypothesis

from tests.conftest import REPO


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of its own, by this repository's settings."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-c", str(REPO / "pyproject.toml"), *arguments],
                          cwd=REPO, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_a_cache_that_cannot_be_written_fails_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "test_fine.py").write_text("def test_fine():\n    pass\n")
    done = pytest("-o", f"cache_dir={file}/cache", str(tmp_path / "test_fine.py"))
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert not file.read_text()


def test_no_example_is_kept():
    found = hypothesis.settings()
    assert found.database is None and found.derandomize


def test_a_test_that_hangs_ends_the_run_with_its_stack(tmp_path):
    path = tmp_path / "test_hanging.py"
    path.write_text("import threading\n\ndef test_hanging():\n    threading.Event().wait()\n")
    done = pytest("-p", "no:cacheprovider", "-o", "faulthandler_timeout=0.5", str(path))
    assert done.returncode == 1 and "Timeout" in done.stderr and "test_hanging.py" in done.stderr
