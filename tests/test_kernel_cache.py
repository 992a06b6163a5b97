"""What compiled kernels are kept apart by, beside their sources."""

import platform

import pytest

from numflow import kernel_cache

MODULE = "numflow.cpu.elementwise.norm_kernels"


@pytest.fixture
def fingerprint():
    """The fingerprint of a module as a new process would find it."""
    def found():
        kernel_cache._compiler.cache_clear()
        return kernel_cache.fingerprint(MODULE)

    yield found
    kernel_cache._compiler.cache_clear()


def test_code_of_another_processor_is_not_taken(fingerprint, monkeypatch):
    """A folder of kernels may be on a disk that machines share, or in an image that another one runs."""
    here = fingerprint()
    assert fingerprint() == here
    for flags in ((), ("fpu", "sse2"), ("fpu", "sse2", "avx512f")):
        monkeypatch.setattr(kernel_cache, "processor_flags", lambda flags=flags: flags)
        assert fingerprint() != here
        here = fingerprint()
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert fingerprint() != here


@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT"])
def test_code_by_other_settings_is_not_taken(fingerprint, monkeypatch, setting):
    found = set()
    for value in (None, "0", "generic"):
        monkeypatch.delenv(setting, raising=False)
        if value is not None:
            monkeypatch.setenv(setting, value)
        found.add(fingerprint())
    assert len(found) == 3


def test_code_by_other_versions_is_not_taken(fingerprint, monkeypatch):
    here, version = fingerprint(), kernel_cache._version
    for package in ("numba", "llvmlite"):
        newer = {package: version(package) + "!"}
        monkeypatch.setattr(kernel_cache, "_version", lambda name, newer=newer: newer.get(name) or version(name))
        assert fingerprint() != here
    monkeypatch.setattr(kernel_cache, "_version", version)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert fingerprint() != here
