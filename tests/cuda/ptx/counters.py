"""Counters of a kernel: what it asks of a multiprocessor, from which a model of its time begins (model.py).

    counters.issued["fma"]          instructions given to warps, by kind
    counters.sectors_per_request()  of global loads: 4 for 32 lanes of 4 bytes side by side, 16 of 16 bytes
    counters.ways()                 turns of the banks for shared loads, over those without conflicts: 1 is best
    counters.touched                bytes of 32-byte sectors that a launch touched at least once
    counters.within                 bytes of the allocations that these are in
    counters.second                 bytes of requests to the second cache, by copies and loads that the first does not
                                    keep; what a warp asks for again before it branches is still on its way, and a bulk
                                    copy to several blocks is one
    counters.ahead                  the same of those that it asked for by `prefetch`
    counters.clocks                 of the blocks that ran, each by itself (timeline.py); `early`: before they wait
                                    for the kernels before theirs

Sectors, banks and bytes are exact. Instructions are PTX's; ptxas folds and moves them, so they are within tens of
percent of the machine's.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

KINDS = {"fma": "fma", "mad": "fma", "mul": "fma", "add": "add", "sub": "add", "mma": "mma", "wgmma": "wgmma",
         "dp4a": "dp4a", "shfl": "shuffle", "movmatrix": "shuffle", "vote": "shuffle", "bar": "barrier",
         "barrier": "barrier", "bra": "branch", "ret": "branch", "exit": "branch", "ldmatrix": "ldmatrix", "cp": "copy",
         "ex2": "special",
         "lg2": "special", "rcp": "special", "rsqrt": "special", "sqrt": "special", "sin": "special",
         "cos": "special", "tanh": "special", "div": "divide", "rem": "divide", "cvt": "convert",
         "prmt": "permute", "mov": "move", "atom": "atomic", "red": "atomic", "setp": "compare", "selp": "compare"}
FOLDED = ("load param", "move")   # operands in machine code
_TYPED = {"f32": "float", "f16x2": "half2", "f64": "double"}


def kind_of(step) -> str:
    """The kind that an instruction is counted as."""
    if step.opcode in ("ld", "st"):
        return f"{'load' if step.opcode == 'ld' else 'store'} {next(p for p in step.parts if p in _SPACES)}"
    kind = KINDS.get(step.opcode, "logic")
    return _TYPED.get(step.type, "integer") if kind in ("fma", "add") else kind


_SPACES = {"param", "global", "shared", "local", "const"}


@dataclass
class Access:
    """Requests of warps to a space. passes: sectors, or turns of the banks; least: as few as the bytes could take."""

    requests: int = 0
    passes: int = 0
    least: int = 0
    bytes: int = 0

    def add(self, requests: int, passes: int, least: int, nbytes: int) -> None:
        """Count requests."""
        self.requests += requests
        self.passes += passes
        self.least += least
        self.bytes += nbytes


@dataclass
class Counters:
    """Of all launches of one kernel. lanes: of all issued instructions, those that took part. products: pairs of
    float16 that tensor cores multiplied, by instruction; two pairs of bytes are one."""

    launches: int = 0
    blocks: int = 0
    warps: int = 0
    lanes: int = 0
    issued: Counter = field(default_factory=Counter)
    products: Counter = field(default_factory=Counter)
    access: dict[str, Access] = field(default_factory=dict)
    second: int = 0
    touched: int = 0
    within: int = 0
    ahead: int = 0
    clocks: float = 0.0
    early: float = 0.0

    def of(self, space: str, way: str) -> Access:
        """Requests to "global" or "shared", "read" or "write"."""
        return self.access.setdefault(f"{space} {way}", Access())

    @property
    def instructions(self) -> int:
        """Given to warps, without what machine code has as operands."""
        return sum(count for kind, count in self.issued.items() if kind not in FOLDED)

    def sectors_per_request(self, way: str = "read") -> float:
        """Sectors of 32 bytes that a request of a warp to global memory touches."""
        access = self.of("global", way)
        return access.passes / max(access.requests, 1)

    def ways(self, way: str = "read") -> float:
        """Turns of shared memory's banks over those without conflicts."""
        access = self.of("shared", way)
        return access.passes / max(access.least, 1)

    def passes(self, space: str) -> int:
        """Sectors or turns of both directions."""
        return sum(self.of(space, way).passes for way in ("read", "write"))

    def row(self) -> dict:
        """For a table."""
        mix = {kind: round(count / max(self.instructions, 1), 3) for kind, count in self.issued.most_common(8)}
        return {"launches": self.launches, "warps": self.warps,
                "instructions of a warp": round(self.instructions / max(self.warps, 1)),
                "bytes touched": self.touched, "sectors of a read": round(self.sectors_per_request(), 2),
                "sectors of a write": round(self.sectors_per_request("write"), 2),
                "ways of a read": round(self.ways(), 2), "ways of a write": round(self.ways("write"), 2), "mix": mix}


def sectors(offset: np.ndarray, size: int, warp: np.ndarray) -> tuple[int, int, int, int]:
    """Requests, sectors, least sectors and bytes of lanes that access `size` aligned bytes each."""
    warps, lanes = np.unique(warp, return_counts=True)
    touched = np.unique(warp.astype(np.int64) << 40 | offset >> 5).size
    return warps.size, touched, int((-(-lanes * size // 32)).sum()), offset.size * size


def turns(address: np.ndarray, size: int, lane: np.ndarray) -> tuple[int, int, int, int]:
    """Requests, turns of the banks, turns without conflicts and bytes; 8 bytes a lane go in halves of a warp, 16 in
    quarters. lane: of all that run."""
    parts, warp = max(size // 4, 1), lane >> 5
    names, index = np.unique(warp, return_inverse=True)
    turn = index.astype(np.int64) * parts + (lane & 31) * parts // 32
    words = ((address // 4)[:, None] + np.arange(parts)).ravel()
    pairs = np.unique(np.repeat(turn, parts) << 32 | words)
    load = np.bincount((pairs >> 32) * 32 + (pairs & 31), minlength=names.size * parts * 32).reshape(-1, 32).max(1)
    return names.size, int(load.sum()), int((load > 0).sum()), address.size * size
