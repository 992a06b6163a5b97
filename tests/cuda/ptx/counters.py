"""Performance counters of a kernel, from which model.py predicts its time.

    counters.issued["fma"]          warp instructions by kind
    counters.sectors_per_request()  32-byte sectors of a global load: 4 if 32 lanes read adjacent words, 16 if 16 bytes
    counters.ways()                 bank conflicts of shared loads: passes over passes without conflicts; 1 is best
    counters.touched                bytes of 32-byte sectors that the launch accessed at least once
    counters.allocated              bytes of the allocations that contain these sectors
    counters.l2_bytes               bytes requested from L2 by copies and by loads that bypass L1; a sector that a warp
                                    requests again before its next branch counts once, and so does a multicast copy
    counters.prefetched             bytes that were prefetched into L2
    counters.clocks                 cycles of the blocks that ran, each alone on a multiprocessor (timeline.py)
    counters.early_clocks           the part of these cycles before griddepcontrol.wait

Sectors, bank passes and bytes are exact. Instructions are PTX instructions; ptxas merges and reorders them, so machine
instructions differ by some ten percent.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

KINDS = {"fma": "fma", "mad": "fma", "mul": "fma", "add": "add", "sub": "add", "mma": "mma", "wgmma": "wgmma",
         "tcgen05": "tcgen05", "dp4a": "dp4a", "shfl": "shuffle", "movmatrix": "shuffle", "vote": "shuffle",
         "bar": "barrier",
         "barrier": "barrier", "bra": "branch", "ret": "branch", "exit": "branch", "ldmatrix": "ldmatrix", "cp": "copy",
         "ex2": "special",
         "lg2": "special", "rcp": "special", "rsqrt": "special", "sqrt": "special", "sin": "special",
         "cos": "special", "tanh": "special", "div": "divide", "rem": "divide", "cvt": "convert",
         "prmt": "permute", "mov": "move", "atom": "atomic", "red": "atomic", "setp": "compare", "selp": "compare"}
FOLDED = ("load param", "move")   # kinds that are operands of other instructions in machine code
_TYPED = {"f32": "float", "f16x2": "half2", "f64": "double"}


def kind_of(step) -> str:
    """The kind under which an instruction is counted."""
    if step.opcode in ("ld", "st"):
        return f"{'load' if step.opcode == 'ld' else 'store'} {next(p for p in step.parts if p in _SPACES)}"
    kind = KINDS.get(step.opcode, "logic")
    return _TYPED.get(step.type, "integer") if kind in ("fma", "add") else kind


_SPACES = {"param", "global", "shared", "local", "const"}


@dataclass
class Access:
    """Warp requests to a state space. passes: sectors, or bank passes of shared memory; least: without conflicts."""

    requests: int = 0
    passes: int = 0
    least: int = 0
    bytes: int = 0

    def add(self, requests: int, passes: int, least: int, nbytes: int) -> None:
        """Add to the counts."""
        self.requests += requests
        self.passes += passes
        self.least += least
        self.bytes += nbytes


@dataclass
class Counters:
    """The counters of all launches of one kernel.

    lanes: active lanes, summed over all issued instructions. products: multiplications of float16 pairs on tensor
    cores, by instruction; two multiplications of bytes count as one.
    """

    launches: int = 0
    blocks: int = 0
    warps: int = 0
    lanes: int = 0
    issued: Counter = field(default_factory=Counter)
    products: Counter = field(default_factory=Counter)
    access: dict[str, Access] = field(default_factory=dict)
    l2_bytes: int = 0
    touched: int = 0
    allocated: int = 0
    prefetched: int = 0
    clocks: float = 0.0
    early_clocks: float = 0.0

    def of(self, space: str, way: str) -> Access:
        """The requests to a space, "global" or "shared", in a direction, "read" or "write"."""
        return self.access.setdefault(f"{space} {way}", Access())

    @property
    def instructions(self) -> int:
        """Issued warp instructions, without those of FOLDED kinds."""
        return sum(count for kind, count in self.issued.items() if kind not in FOLDED)

    def sectors_per_request(self, way: str = "read") -> float:
        """Average number of 32-byte sectors of a warp's request to global memory."""
        access = self.of("global", way)
        return access.passes / max(access.requests, 1)

    def ways(self, way: str = "read") -> float:
        """Average degree of bank conflicts: passes of shared memory over passes without conflicts."""
        access = self.of("shared", way)
        return access.passes / max(access.least, 1)

    def passes(self, space: str) -> int:
        """Sectors or bank passes of both directions."""
        return sum(self.of(space, way).passes for way in ("read", "write"))

    def row(self) -> dict:
        """A row of a table."""
        mix = {kind: round(count / max(self.instructions, 1), 3) for kind, count in self.issued.most_common(8)}
        return {"launches": self.launches, "warps": self.warps,
                "instructions of a warp": round(self.instructions / max(self.warps, 1)),
                "bytes touched": self.touched, "sectors of a read": round(self.sectors_per_request(), 2),
                "sectors of a write": round(self.sectors_per_request("write"), 2),
                "ways of a read": round(self.ways(), 2), "ways of a write": round(self.ways("write"), 2), "mix": mix}


def sectors(offset: np.ndarray, size: int, warp: np.ndarray) -> tuple[int, int, int, int]:
    """Requests, sectors, fewest possible sectors, and bytes, of lanes that access `size` aligned bytes each."""
    warps, lanes = np.unique(warp, return_counts=True)
    touched = np.unique(warp.astype(np.int64) << 40 | offset >> 5).size
    return warps.size, touched, int((-(-lanes * size // 32)).sum()), offset.size * size


def bank_passes(address: np.ndarray, size: int, lane: np.ndarray) -> tuple[int, int, int, int]:
    """Requests, bank passes, passes without conflicts, and bytes, of accesses to shared memory.

    Accesses of 8 bytes a lane are split into half warps, of 16 bytes into quarter warps. lane: index among all lanes.
    """
    parts, warp = max(size // 4, 1), lane >> 5
    names, index = np.unique(warp, return_inverse=True)
    pass_ = index.astype(np.int64) * parts + (lane & 31) * parts // 32
    words = ((address // 4)[:, None] + np.arange(parts)).ravel()
    pairs = np.unique(np.repeat(pass_, parts) << 32 | words)
    load = np.bincount((pairs >> 32) * 32 + (pairs & 31), minlength=names.size * parts * 32).reshape(-1, 32).max(1)
    return names.size, int(load.sum()), int((load > 0).sum()), address.size * size
