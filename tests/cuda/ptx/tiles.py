"""Products of warpgroups (wgmma): tensor cores read tiles in shared memory and add to registers, in the background.

Here a product is worked out when it is begun; what its warps do until they have waited for it is looked at. Noted are
sums that are touched before that, or written after wgmma.fence; tiles written by threads without fence.proxy.async
since, and, as races, tiles written before the product has ended; warpgroups whose warps do not all come.
"""

from dataclasses import dataclass

import numpy as np

from .effects import effect
from .findings import Fault
from .operands import wide
from .parse import Several
from .races import READ
from .warps import LANES, READERS, WARP

GROUP = 4                                    # warps of a warpgroup
ROW = {0: 16, 1: 128, 2: 64, 3: 32}          # bytes of a row of a tile, by mode of swizzle; 8 rows make its pattern
TURNED = {0: 0, 1: 7, 2: 3, 3: 1}            # bits of a row's number that its parts of 16 bytes are exchanged by


@dataclass
class Begun:
    """A product that warps have begun: registers of sums, groups by warp (-1: not theirs), reads of tiles."""

    registers: set[int]
    groups: np.ndarray
    reads: list


class Tiles:
    """What the tensor cores have of the warps of one launch."""

    def __init__(self, machine):
        self.machine, warps = machine, machine.n // WARP
        self.open, self.count = np.zeros(warps, np.int64), np.zeros(warps, np.int64)    # groups closed; products begun
        self.begun: list[Begun] = []
        self.handed: dict[int, np.ndarray] = {}       # values of sums at the last wgmma.fence, or after a product
        numbers = {part.number for step in machine.kernel.instructions if step.opcode == "wgmma" and step.operands
                   and isinstance(step.operands[0], Several) for part in step.operands[0].parts}
        self.sums = numbers
        self.unfenced = np.zeros(machine.shared.flying.size, np.int32)   # thread + 1 that wrote a word unseen, else 0

    def fence(self, mask) -> None:
        """wgmma.fence: sums as they are now are the tensor cores'."""
        for number in sorted(self.sums):
            self._hand(number, self.machine.regs[number], mask)

    def _hand(self, number: int, value, mask) -> None:
        if value is not None:
            value = self.machine.spread(value)
            old = self.handed.get(number)
            self.handed[number] = value if mask is None or old is None else np.where(mask, value, old)

    def wrote(self, offset, size: int, lanes) -> None:
        """Threads have written to shared memory."""
        self.unfenced[(offset[:, None] + np.arange(0, max(size, 4), 4)) // 4] = lanes[:, None] + 1

    def show(self, mask) -> None:
        """fence.proxy.async: what these threads wrote is seen."""
        shown = np.append(False, self.machine.active(mask))
        self.unfenced[shown[self.unfenced]] = 0

    def commit(self, mask) -> None:
        """Close the open groups of these warps."""
        self.open += self._warps(mask)

    def _warps(self, mask) -> np.ndarray:
        return self.machine.active(mask).reshape(-1, WARP).any(1)

    def wait(self, mask, most: int) -> None:
        """All groups of these warps but the last `most` have ended."""
        warps, rest = self._warps(mask), []
        for product in self.begun:
            done = warps & (product.groups >= 0) & (product.groups < self.open - most)
            self._reads(product, done, "release")
            product.groups = np.where(done, -1, product.groups)
            if (product.groups >= 0).any():
                rest.append(product)
        self.begun = rest
        for product in rest if self.machine.bulk else ():
            self._reads(product, product.groups >= 0, "keep")

    def _reads(self, product: Begun, warps: np.ndarray, what: str) -> None:
        """Tell who keeps accesses that reads of these warps have ended, or go on."""
        if self.machine.bulk and warps.any():
            for _, offset, lanes in product.reads:
                of = warps[lanes // WARP]
                getattr(self.machine.bulk, what)(offset[of], lanes[of])

    def meet(self, mask) -> None:
        """These warps have passed a barrier: what they still multiply is read behind it too."""
        warps = self._warps(mask)
        for product in self.begun:
            going = warps & (product.groups >= 0)
            for step, offset, lanes in product.reads if going.any() else ():
                of = going[lanes // WARP]
                self.machine._log(self.machine.log_shared, step, offset[of], 16, READ, lanes[of])

    def busy(self, number: int) -> np.ndarray | None:
        """Lanes of which a register is a sum under way."""
        if number not in self.sums:
            return None
        found = [product.groups >= 0 for product in self.begun if number in product.registers]
        return np.repeat(np.logical_or.reduce(found), WARP) if found else None

    def look(self, number: int, mask) -> None:
        """A register is read or written by an ordinary instruction."""
        busy = self.busy(number)
        if busy is not None and (busy & self.machine.active(mask)).any():
            self.machine.note(f"sums are touched before wgmma.wait_group: {self.machine.where}")

    def end(self) -> None:
        """All threads have ended."""
        counts = self.count.reshape(self.machine.blocks, -1)
        whole = counts.shape[1] // GROUP * GROUP
        groups = counts[:, :whole].reshape(-1, GROUP)
        if (groups != groups[:, :1]).any() or counts[:, whole:].any():
            self.machine.note("warps of a warpgroup do not all come to wgmma")
        if self.begun:
            self.machine.note("threads end before wgmma.wait_group")


@effect("wgmma")
def _warpgroup(step):
    """wgmma.fence, commit_group, wait_group, mma_async of two tiles of 16 or 8 bits in shared memory, K-major."""
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
            or flags != ["1", "1", "1", *["0", "0"] * wide_] or isinstance(step.operands[1], Several):
        raise Fault(f"no such wgmma here: {step.text}")
    across, readers = int(shape[4:-3]), [READERS[kind] for kind in kinds[1:]]
    registers = step.operands[0].parts
    places = [wide(operand, "u64") for operand in step.operands[1:3]]

    def run(machine, mask):
        warps, tiles = machine.whole_warps(mask), machine.tiles
        chosen = np.flatnonzero(warps)
        if not chosen.size:
            return
        lanes = (chosen[:, None] * WARP + LANES).ravel().astype(np.int32)
        described = [_described(get(machine).reshape(-1, WARP)[chosen]) for get in places]
        reads = []
        left, right = (_rows(machine, step, *one, chosen, lanes, reads, across if side else None, readers[side])
                       for side, one in enumerate(described))
        product, row, column = np.matmul(left, right.transpose(0, 2, 1)), LANES // 4, LANES % 4 * 2
        numbers = {register.number for register in registers}
        for place, register in enumerate(registers):
            old = machine.regs[register.number]
            busy = tiles.busy(register.number)
            if old is None or register.number in machine.partial:
                old = machine._unwritten(register.number)
            old = machine.spread(old)
            _check_handed(machine, tiles, register.number, old, busy, lanes)
            at = product[:, row + 8 * (place >> 1 & 1), 8 * (place >> 2) + column + (place & 1)].ravel()
            value = old.copy()
            value[lanes] += at
            machine.regs[register.number] = value
            tiles._hand(register.number, value, mask)
        groups = np.where(warps, tiles.open, -1)
        tiles.begun.append(Begun(numbers, groups, reads))
        tiles._reads(tiles.begun[-1], warps, "keep")
        tiles.count[chosen] += 1
        if machine.counters:
            kind, depth = ("wgmma of bytes", 32) if bytes_ else ("wgmma", 16)
            machine.counters.products[kind] += 16 * across * depth * chosen.size
    return run


def _check_handed(machine, tiles, number, now, busy, lanes) -> None:
    handed = tiles.handed.get(number)
    own = lanes if busy is None else lanes[~busy[lanes]]
    if own.size and (handed is None or (handed[own].view(np.uint32) != now[own].view(np.uint32)).any()):
        machine.note(f"sums are written after wgmma.fence: {machine.where}")


def _described(words: np.ndarray) -> tuple:
    """Start, offsets of the next 8 columns and 8 rows, mode of swizzle, of each warp's descriptor (uint64)."""
    if (words != words[:, :1]).any():
        raise Fault("lanes of a warp describe different tiles")
    word = words[:, 0]
    start, lead, stride = ((word >> np.uint64(at) & np.uint64(0x3FFF)).astype(np.int64) << 4 for at in (0, 16, 32))
    mode = np.unique(word >> np.uint64(62)).astype(int)
    if mode.size > 1 or (word >> np.uint64(46) & np.uint64(0xFFFF)).any():
        raise Fault("descriptors of tiles with base offsets, or of several swizzles, are not known here")
    return start, lead, stride, int(mode[0])


def _rows(machine, step, start, lead, stride, mode, chosen, lanes, reads, across, read) -> np.ndarray:
    """float32 [warps, rows, columns] of 32 bytes of rows: the 16 rows of each warp's place in its group, or all
    `across` ones."""
    if ((start // ROW[mode] * ROW[mode]) % (8 * ROW[mode])).any() and mode:
        raise Fault(f"a tile begins within the pattern of its swizzle: {step.text}")
    count = across or 16
    row = np.arange(count) + (0 if across else 16 * (chosen % (machine.grid.threads // WARP) % GROUP)[:, None])
    part = np.arange(2)[:, None, None]                                   # of 16 bytes
    along = part * (16 if mode else lead[:, None])
    place = start[:, None] + row // 8 * stride[:, None] + row % 8 * ROW[mode] + along
    place ^= (place >> 7 & TURNED[mode]) << 4                            # [2, warps, rows]
    found, place = [], place.transpose(1, 2, 0).reshape(chosen.size, -1)
    place = np.pad(place, ((0, 0), (0, -place.shape[1] % WARP)), "edge")
    for turn in place.reshape(chosen.size, -1, WARP).transpose(1, 0, 2):
        address = np.zeros(machine.n, np.int64)
        address[lanes] = turn.ravel()
        _, offset = machine.reach(step, "shared", address, 16, lanes, READ, counted=False)
        if machine.tiles.unfenced[offset[:, None] // 4 + np.arange(4)].any():
            machine.note(f"a tile was written without fence.proxy.async since: {step.text}")
        found.append(offset.reshape(chosen.size, WARP))
        reads.append((step, offset, lanes))
    offset = np.stack(found, 1).reshape(chosen.size, -1)[:, :2 * count].reshape(chosen.size, count, 2)
    if machine.counters:   # the tensor cores of a group read its second tile together
        bytes_ = 32 * count * chosen.size // (GROUP if across else 1)
        machine.counters.of("shared", "read").add(chosen.size, bytes_ // 128, bytes_ // 128, bytes_)
    data = machine.shared.bytes[offset[..., None] + np.arange(16)].reshape(chosen.size, count, 32)
    return read(np.ascontiguousarray(data)).reshape(chosen.size, count, -1)
