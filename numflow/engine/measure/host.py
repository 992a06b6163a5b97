"""Facts about the machine and versions, reported with measurements."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from numflow.distribution import NAME

_CPUINFO, _CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")
# Instruction sets that select kernels, in Linux's names; processors of the same name may differ in them.
_FLAGS = ("sse4_1", "fma", "f16c", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp",
          "i8mm", "sve")


def host() -> dict[str, Any]:
    """cpu, family, flags (of _FLAGS), caches, cores, system, machine, and the versions of Python and packages."""
    versions: dict[str, str | None] = {}
    for name, package in (("numflow", NAME), ("numpy", "numpy"), ("numba", "numba"), ("llvmlite", "llvmlite")):
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[name] = None
    facts = _cpuinfo()
    family = [facts[key] for key in ("cpu family", "model", "stepping") if key in facts]
    there = set((facts.get("flags") or facts.get("Features") or "").split())
    return {"cpu": facts.get("model name") or platform.processor(), "family": ".".join(family) or None,
            "flags": [flag for flag in _FLAGS if flag in there], "caches": _caches(), "cores": _cores(),
            "system": platform.platform(), "machine": platform.machine(), "python": platform.python_version(),
            **versions}


def load_average() -> float | None:
    """Load average of the last minute; None if unknown."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpuinfo() -> dict[str, str]:
    """Lines of the first processor in /proc/cpuinfo; {} without this file."""
    try:
        first = _CPUINFO.read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _caches() -> dict[str, str]:
    """Caches of one core: level and kind -> size: {"L1d": "32K", "L2": "1024K"}."""
    found = {}
    for folder in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        found[f"L{level}" + {"Data": "d", "Instruction": "i"}.get(kind, "")] = size
    return found
