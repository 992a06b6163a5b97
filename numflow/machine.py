"""Memory of this machine that is available to this process."""

import os
import re
from pathlib import Path

_GROUPS = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")  # cgroup v2, v1
_NO_LIMIT = 1 << 60


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate: minimum over the machine, its control groups and its address limit.

    Pages of mapped files of this process, such as weights, count as used, though the system could drop them. None if
    unknown. root: root of the file system to read.
    """
    machine, process = _sizes(root / "proc/meminfo"), _sizes(root / "proc/self/status")
    free = [machine["MemAvailable"] - process.get("RssFile", 0)] if "MemAvailable" in machine else []
    for limit, used, reclaimable in _limits(root):
        free.append(limit - max(0, used - reclaimable) - process.get("RssFile", 0))
    if (addresses := _address_limit()) is not None and "VmSize" in process:
        free.append(addresses - process["VmSize"])
    return max(0, min(free)) if free else None


def whole_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process could use if nothing else ran; None if unknown."""
    total = [size for size in [_sizes(root / "proc/meminfo").get("MemTotal")] if size]
    if not total and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    total += [limit for limit, *_ in _limits(root)]
    if (addresses := _address_limit()) is not None:
        total.append(addresses)
    return min(total) if total else None


def _sizes(path: Path) -> dict[str, int]:
    """Lines such as "MemTotal:  16 kB" as bytes by name."""
    return {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)}


def _limits(root: Path) -> list[tuple[int, int, int]]:
    """(limit, used, reclaimable) in bytes of each control group with a limit."""
    found = []
    for folder in _group_folders(root):
        for limit_file, used_file in _GROUPS:
            limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
                stat: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE))
                files = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
                found.append((int(limit), int(used), int(files)))
    return found


def _group_folders(root: Path) -> list[Path]:
    """Folders of the control groups of this process, including parents."""
    folders: dict[Path, None] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        kinds, _, path = line.partition(":")[2].partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            folders[top.joinpath(*parts[:count])] = None
    return list(folders)


def _address_limit() -> int | None:
    """Limit of the address space of this process in bytes (ulimit -v)."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
