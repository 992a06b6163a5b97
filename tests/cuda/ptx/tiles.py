"""wgmma: asynchronous products of warpgroups, from tiles in shared memory to accumulators in registers.

A product is computed when it is issued. Until its warps have waited for it, these errors are reported: accumulators
that are used before the wait, or written after wgmma.fence; tiles that threads have written without a fence.proxy.async
afterwards; tiles that are written before the product has ended (as data races); warpgroups whose warps do not all issue
the product.
"""

from dataclasses import dataclass

import numpy as np

from .effects import effect
from .findings import Fault
from .operands import wide
from .parse import Vector
from .races import READ
from .warps import LANES, READERS, WARP

GROUP = 4                                    # warps of a warpgroup
ROW = {0: 16, 1: 128, 2: 64, 3: 32}          # bytes of a row of a tile, by swizzle mode; the pattern has 8 rows
TURNED = {0: 0, 1: 7, 2: 3, 3: 1}            # bits of the row index that are XORed to the index of a 16-byte chunk


@dataclass
class PendingProduct:
    """A pending product: accumulator registers; for each warp its wgmma group, -1 for none; reads of the tiles."""

    registers: set[int]
    groups: np.ndarray
    reads: list


class Tiles:
    """The pending products of one launch."""

    def __init__(self, machine):
        self.machine, warps = machine, machine.n // WARP
        self.committed, self.count = (np.zeros(warps, np.int64) for _ in range(2))    # groups; products issued
        self.pending: list[PendingProduct] = []
        self.fenced: dict[int, np.ndarray] = {}       # accumulators at the last wgmma.fence, or after a product
        numbers = {part.number for step in machine.kernel.instructions if step.opcode == "wgmma" and step.operands
                   and isinstance(step.operands[0], Vector) for part in step.operands[0].parts}
        self.accumulators = numbers
        self.unfenced = np.zeros(machine.shared.pending.size, np.int32)   # lane + 1 of an unfenced write, or 0

    def fence(self, mask) -> None:
        """wgmma.fence: the current values of the accumulators become visible to the tensor cores."""
        for number in sorted(self.accumulators):
            self._set_fenced(number, self.machine.regs[number], mask)

    def _set_fenced(self, number: int, value, mask) -> None:
        if value is not None:
            value = self.machine.spread(value)
            old = self.fenced.get(number)
            self.fenced[number] = value if mask is None or old is None else np.where(mask, value, old)

    def wrote(self, offset, size: int, lanes) -> None:
        """Note ordinary writes to shared memory, which need a proxy fence."""
        self.unfenced[(offset[:, None] + np.arange(0, max(size, 4), 4)) // 4] = lanes[:, None] + 1

    def fence_proxy(self, mask) -> None:
        """fence.proxy.async: writes of these threads become visible to the tensor cores."""
        shown = np.append(False, self.machine.active(mask))
        self.unfenced[shown[self.unfenced]] = 0

    def commit(self, mask) -> None:
        """wgmma.commit_group of these warps."""
        self.committed += self._active_warps(mask)

    def _active_warps(self, mask) -> np.ndarray:
        return self.machine.active(mask).reshape(-1, WARP).any(1)

    def wait(self, mask, most: int) -> None:
        """wgmma.wait_group: all groups of these warps but the last `most` have ended."""
        warps, rest = self._active_warps(mask), []
        for product in self.pending:
            done = warps & (product.groups >= 0) & (product.groups < self.committed - most)
            self._report_reads(product, done, "end_access")
            product.groups = np.where(done, -1, product.groups)
            if (product.groups >= 0).any():
                rest.append(product)
        self.pending = rest
        for product in rest if self.machine.bulk else ():
            self._report_reads(product, product.groups >= 0, "begin_access")

    def _report_reads(self, product: PendingProduct, warps: np.ndarray, what: str) -> None:
        """Tell the log of accesses (bulk.py) that the reads of these warps have ended, or are still in progress."""
        if self.machine.bulk and warps.any():
            for _, offset, lanes in product.reads:
                of = warps[lanes // WARP]
                getattr(self.machine.bulk, what)(offset[of], lanes[of])

    def meet(self, mask) -> None:
        """A barrier of these warps: reads of their pending products count as reads after the barrier too."""
        warps = self._active_warps(mask)
        for product in self.pending:
            going = warps & (product.groups >= 0)
            for step, offset, lanes in product.reads if going.any() else ():
                of = going[lanes // WARP]
                self.machine._log(self.machine.log_shared, step, offset[of], 16, READ, lanes[of])

    def busy(self, number: int) -> np.ndarray | None:
        """Lanes for which a register is the accumulator of a pending product; None if it is no accumulator."""
        if number not in self.accumulators:
            return None
        found = [product.groups >= 0 for product in self.pending if number in product.registers]
        return np.repeat(np.logical_or.reduce(found), WARP) if found else None

    def look(self, number: int, mask) -> None:
        """Check an access to a register by an ordinary instruction."""
        busy = self.busy(number)
        if busy is not None and (busy & self.machine.active(mask)).any():
            self.machine.note(f"accumulators are used before wgmma.wait_group: {self.machine.where}")

    def end(self) -> None:
        """Checks after all threads have exited."""
        counts = self.count.reshape(self.machine.blocks, -1)
        whole = counts.shape[1] // GROUP * GROUP
        groups = counts[:, :whole].reshape(-1, GROUP)
        if (groups != groups[:, :1]).any() or counts[:, whole:].any():
            self.machine.note("not all warps of a warpgroup execute wgmma")
        if self.pending:
            self.machine.note("threads exit before wgmma.wait_group")


@effect("wgmma")
def _warpgroup(step):
    """wgmma.fence, commit_group, wait_group; mma_async of two K-major tiles of 16 or 8 bits in shared memory."""
    if "mma_async" in step.parts:
        return _product(step)

    def run(machine, mask):
        machine.whole_warps(mask)
        if "fence" in step.parts:
            machine.tiles.fence(mask)
        elif "commit_group" in step.parts:
            machine.tiles.commit(mask)
        else:
            machine.tiles.wait(mask, int(step.operands[0].text))
    return run


def _product(step):
    shape = next((part for part in step.parts if part.startswith("m64n")), "")
    kinds, flags = step.parts[-3:], [getattr(operand, "text", "") for operand in step.operands[3:]]
    bytes_ = {"e4m3", "e5m2"} >= {*kinds[1:]}
    wide_ = kinds[1] == kinds[2] and kinds[1] in ("f16", "bf16")
    if kinds[0] != "f32" or not (bytes_ or wide_) or not shape.endswith("k32" if bytes_ else "k16") \
            or flags != ["1", "1", "1", *["0", "0"] * wide_] or isinstance(step.operands[1], Vector):
        raise Fault(f"no such wgmma here: {step.text}")
    across, readers = int(shape[4:-3]), [READERS[kind] for kind in kinds[1:]]
    registers = step.operands[0].parts
    descriptor_of = [wide(operand, "u64") for operand in step.operands[1:3]]

    def run(machine, mask):
        warps, tiles = machine.whole_warps(mask), machine.tiles
        chosen = np.flatnonzero(warps)
        if not chosen.size:
            return
        lanes = (chosen[:, None] * WARP + LANES).ravel().astype(np.int32)
        descriptors = [_descriptor_fields(get(machine).reshape(-1, WARP)[chosen]) for get in descriptor_of]
        reads = []
        a_matrix, b_matrix = (_rows(machine, step, *descriptor, chosen, lanes, reads, across if side else None,
                                    readers[side])
                              for side, descriptor in enumerate(descriptors))
        product, row, column = np.matmul(a_matrix, b_matrix.transpose(0, 2, 1)), LANES // 4, LANES % 4 * 2
        numbers = {register.number for register in registers}
        for place, register in enumerate(registers):
            old = machine.regs[register.number]
            busy = tiles.busy(register.number)
            if old is None or register.number in machine.partial:
                old = machine._unwritten(register.number)
            old = machine.spread(old)
            _check_fenced(machine, tiles, register.number, old, busy, lanes)
            at = product[:, row + 8 * (place >> 1 & 1), 8 * (place >> 2) + column + (place & 1)].ravel()
            value = old.copy()
            value[lanes] += at
            machine.regs[register.number] = value
            tiles._set_fenced(register.number, value, mask)
        groups = np.where(warps, tiles.committed, -1)
        tiles.pending.append(PendingProduct(numbers, groups, reads))
        tiles._report_reads(tiles.pending[-1], warps, "begin_access")
        tiles.count[chosen] += 1
        if machine.counters:
            kind, depth = ("wgmma of bytes", 32) if bytes_ else ("wgmma", 16)
            machine.counters.products[kind] += 16 * across * depth * chosen.size
    return run


def _check_fenced(machine, tiles, number, now, busy, lanes) -> None:
    handed = tiles.fenced.get(number)
    own = lanes if busy is None else lanes[~busy[lanes]]
    if own.size and (handed is None or (handed[own].view(np.uint32) != now[own].view(np.uint32)).any()):
        machine.note(f"accumulators are written after wgmma.fence: {machine.where}")


def _descriptor_fields(words: np.ndarray) -> tuple:
    """Fields of each warp's matrix descriptor (uint64): address, leading and stride offsets, swizzle mode."""
    if (words != words[:, :1]).any():
        raise Fault("lanes of a warp describe different tiles")
    word = words[:, 0]
    start, lead, stride = ((word >> np.uint64(at) & np.uint64(0x3FFF)).astype(np.int64) << 4 for at in (0, 16, 32))
    mode = np.unique(word >> np.uint64(62)).astype(int)
    if mode.size > 1 or (word >> np.uint64(46) & np.uint64(0xFFFF)).any():
        raise Fault("descriptors of tiles with base offsets, or of several swizzles, are not known here")
    return start, lead, stride, int(mode[0])


def _rows(machine, step, start, lead, stride, mode, chosen, lanes, reads, across, read) -> np.ndarray:
    """Read 32 bytes of each row of a tile, as float32 [warps, rows, columns].

    The first tile: the 16 rows of each warp of the warpgroup. The second tile: all `across` rows.
    """
    if ((start // ROW[mode] * ROW[mode]) % (8 * ROW[mode])).any() and mode:
        raise Fault(f"a tile begins within the pattern of its swizzle: {step.text}")
    count = across or 16
    row = np.arange(count) + (0 if across else 16 * (chosen % (machine.grid.threads // WARP) % GROUP)[:, None])
    chunk = np.arange(2)[:, None, None]                                   # of 16 bytes
    column_offset = chunk * (16 if mode else lead[:, None])
    tile_address = start[:, None] + row // 8 * stride[:, None] + row % 8 * ROW[mode] + column_offset
    tile_address ^= (tile_address >> 7 & TURNED[mode]) << 4                            # [2, warps, rows]
    found, tile_address = [], tile_address.transpose(1, 2, 0).reshape(chosen.size, -1)
    tile_address = np.pad(tile_address, ((0, 0), (0, -tile_address.shape[1] % WARP)), "edge")
    for addresses in tile_address.reshape(chosen.size, -1, WARP).transpose(1, 0, 2):
        address = np.zeros(machine.n, np.int64)
        address[lanes] = addresses.ravel()
        _, offset = machine.check_access(step, "shared", address, 16, lanes, READ, counted=False)
        if machine.tiles.unfenced[offset[:, None] // 4 + np.arange(4)].any():
            machine.note(f"a tile was written without a fence.proxy.async afterwards: {step.text}")
        found.append(offset.reshape(chosen.size, WARP))
        reads.append((step, offset, lanes))
    offset = np.stack(found, 1).reshape(chosen.size, -1)[:, :2 * count].reshape(chosen.size, count, 2)
    if machine.counters:   # the warps of a warpgroup read the second tile only once
        bytes_ = 32 * count * chosen.size // (GROUP if across else 1)
        machine.counters.of("shared", "read").add(chosen.size, bytes_ // 128, bytes_ // 128, bytes_)
    data = machine.shared.bytes[offset[..., None] + np.arange(16)].reshape(chosen.size, count, 32)
    return read(np.ascontiguousarray(data)).reshape(chosen.size, count, -1)
