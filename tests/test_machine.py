"""The memory that this process may use: of the machine, of control groups, of its own limit."""

import pytest

from numflow import machine
from numflow.machine import free_memory, whole_memory

MB = 1 << 20
MEMINFO = "MemTotal:       1024000 kB\nMemFree:          1000 kB\nMemAvailable:    512000 kB\n"
STATUS = "Name:\tx\nVmSize:\t  204800 kB\nRssAnon:\t 500 kB\nRssFile:\t  102400 kB\n"


@pytest.fixture(autouse=True)
def no_own_limit(monkeypatch):
    monkeypatch.setattr(machine, "_address_limit", lambda: None)


def tree(root, **files):
    """A /proc and /sys below root. Names have __ for /."""
    for name, text in {"proc__meminfo": MEMINFO, "proc__self__status": STATUS, **files}.items():
        path = root / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_of_the_machine(tmp_path):
    root = tree(tmp_path)
    assert free_memory(root) == (500 - 100) * MB  # what is available, but for the files that are in use
    assert whole_memory(root) == 1000 * MB


def test_of_the_innermost_group_that_is_full(tmp_path):
    """cgroup v2; the outer group has less left than the inner one, and none has a number."""
    root = tree(tmp_path, **{
        "proc__self__cgroup": "0::/outer/inner\n",
        "sys__fs__cgroup__outer__inner__memory-max": f"{400 * MB}\n",
        "sys__fs__cgroup__outer__inner__memory-current": f"{50 * MB}\n",
        "sys__fs__cgroup__outer__memory-max": f"{300 * MB}\n",
        "sys__fs__cgroup__outer__memory-current": f"{160 * MB}\n",
        "sys__fs__cgroup__outer__memory-stat": f"anon {9 * MB}\ninactive_file {60 * MB}\n",
        "sys__fs__cgroup__memory-max": "max\n"})
    assert free_memory(root) == (300 - (160 - 60) - 100) * MB
    assert whole_memory(root) == 300 * MB


def test_of_the_first_version_of_groups(tmp_path):
    root = tree(tmp_path, **{
        "proc__self__cgroup": "9:cpu:/a\n5:memory:/b\n",
        "sys__fs__cgroup__memory__b__memory-limit_in_bytes": f"{350 * MB}\n",
        "sys__fs__cgroup__memory__b__memory-usage_in_bytes": f"{20 * MB}\n",
        "sys__fs__cgroup__memory__memory-limit_in_bytes": f"{2**63 - 4096}\n",
        "sys__fs__cgroup__memory__memory-usage_in_bytes": f"{20 * MB}\n"})
    assert free_memory(root) == (350 - 20 - 100) * MB
    assert whole_memory(root) == 350 * MB


def test_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_address_limit", lambda: 260 * MB)
    root = tree(tmp_path)
    assert free_memory(root) == (260 - 200) * MB and whole_memory(root) == 260 * MB


def test_a_system_that_does_not_say(tmp_path):
    assert free_memory(tmp_path) is None


def test_never_below_nothing(tmp_path):
    assert free_memory(tree(tmp_path, proc__meminfo="MemAvailable: 1 kB\n")) == 0
