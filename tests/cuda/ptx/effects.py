"""Instructions that do more than compute one value: binder(instruction) -> function(machine, mask).

mask: bool over all lanes, True for active ones; None if all lanes that have not exited are active.
"""

import numpy as np

from .findings import Fault
from .operands import address, constant, getter, wide
from .parse import TYPES, Pair, Register, Vector
from .races import ATOMIC, READ, WRITE
from .values import compared

EFFECTS = {}
SPACES = ("global", "shared", "local", "param", "const")
U32, U64 = np.uint32, np.uint64


def effect(*names):
    """A decorator that enters a binder into the table EFFECTS for these opcodes."""
    return lambda binder: EFFECTS.update(dict.fromkeys(names, binder)) or binder


def space_of(step) -> str:
    """State space of an access. Without a name it is global: generic addresses are taken to point to global memory."""
    found = next((part.removesuffix("_cta") for part in step.parts if part.removesuffix("_cta") in SPACES), "global")
    return "global" if found == "const" else found


@effect("setp")
def _setp(step):
    function, to = compared(step), step.operands[0]
    if isinstance(to, Pair):
        def both(machine, mask):
            result = function(machine)
            machine.put(to.first, result, mask)
            machine.put(to.second, ~result, mask)
        return both
    return lambda machine, mask: machine.put(to, function(machine), mask)


def unpack(step):
    """mov {a, b}, one."""
    registers = step.operands[0].parts
    size = 8 * np.dtype(TYPES[step.type]).itemsize // len(registers)
    get = wide(step.operands[1], step.type)

    def run(machine, mask):
        parts = get(machine).view(f"u{size // 8}").reshape(-1, len(registers))
        for number, register in enumerate(registers):
            machine.put(register, np.ascontiguousarray(parts[:, number]), mask)
    return run


@effect("ld")
def _load(step):
    space, dtype = space_of(step), TYPES[step.type]
    to, source = step.operands
    registers = to.parts if isinstance(to, Vector) else (to,)
    size = np.dtype(dtype).itemsize
    if space == "param":
        name, index = source.base.name, source.offset // size
        return lambda machine, mask: [machine.put(register, machine.argument(name, index + number, dtype), mask)
                                      for number, register in enumerate(registers)] and None
    place, whole = address(source), size * len(registers)

    def run(machine, mask):
        lanes = machine.lanes(mask)
        if not lanes.size:
            return
        memory, offset = machine.check_access(step, space, place(machine), whole, lanes, READ)
        view, at = memory.view(dtype), offset // size
        for number, register in enumerate(registers):
            machine.put_lanes(register, view[at + number if number else at], lanes, mask)
    return run


@effect("st")
def _store(step):
    space, dtype = space_of(step), TYPES[step.type]
    to, source = step.operands
    size = np.dtype(dtype).itemsize
    parts = source.parts if isinstance(source, Vector) else (source,)
    getters = [getter(part, _stored_as(part, step.type, size)) for part in parts]
    place, whole = address(to), size * len(parts)

    def run(machine, mask):
        lanes = machine.lanes(mask)
        if not lanes.size:
            return
        values = [machine.of_lanes(get(machine), lanes).astype(dtype) for get in getters]
        memory, offset = machine.check_access(step, space, place(machine), whole, lanes, WRITE)
        view, at = memory.view(dtype), offset // size
        for number, value in enumerate(values):
            view[at + number] = value
        if machine.checks.races and any((view[at + n] != v).any() for n, v in enumerate(values)):
            _disagree(machine, step, view, at, values)
    return run


def _disagree(machine, step, view, at, values) -> None:
    """Report a store after which memory does not hold a lane's value: another lane wrote a different one. Compares
    bits, so that NaN equals itself."""
    kind = f"u{view.itemsize}"
    if any((view[at + n].view(kind) != v.view(kind)).any() for n, v in enumerate(values)):
        machine.note(f"lanes write different values to one place: {step.text}")


def _stored_as(part, kind: str, size: int) -> str:
    """Type as which a stored operand is read: the register's own if it is wider than the access, which stores the lower
    part."""
    wider = isinstance(part, Register) and np.dtype(TYPES[part.type]).itemsize != size
    return part.type if wider else kind


ATOMICS = {"add": np.add, "max": np.maximum, "min": np.minimum, "exch": lambda old, new: new, "or": np.bitwise_or,
           "and": np.bitwise_and, "xor": np.bitwise_xor,
           "inc": lambda old, new: type(old)(0) if old >= new else old + type(old)(1)}


@effect("atom", "red")
def _atomic(step):
    returns = step.opcode == "atom"
    to, operands = (step.operands[0] if returns else None), step.operands[returns:]
    how = next((part for part in step.parts if part in ATOMICS or part == "cas"), None)
    if how is None:
        raise Fault(f"no such atomic here: {step.text}")
    place, dtype, space = address(operands[0]), TYPES[step.type], space_of(step)
    getters, size = [getter(operand, step.type) for operand in operands[1:]], np.dtype(dtype).itemsize

    def run(machine, mask):
        lanes = machine.lanes(mask)
        if not lanes.size:
            return
        values = [machine.of_lanes(get(machine), lanes) for get in getters]
        memory, offset = machine.check_access(step, space, place(machine), size, lanes, ATOMIC)
        view, old, at = memory.view(dtype), np.zeros(lanes.size, dtype), offset // size
        for lane in machine.in_some_order(lanes.size):
            old[lane] = view[at[lane]]
            if how != "cas":
                view[at[lane]] = ATOMICS[how](old[lane], values[0][lane])
            elif old[lane] == values[0][lane]:
                view[at[lane]] = values[1][lane]
        if returns:
            machine.put_lanes(to, old, lanes, mask)
    return run


@effect("bar", "barrier")
def _warp_barrier(step):
    """bar.warp.sync. The machine handles block barriers itself."""
    if "cluster" in step.parts:
        return EFFECTS["cluster"](step)
    return lambda machine, mask: machine.meet_warps(machine.whole_warps(mask))


@effect("griddepcontrol")
def _dependent(step):
    """griddepcontrol: .wait marks lanes as having waited for earlier kernels. .launch_dependents has no effect here."""
    return lambda machine, mask: machine.wait_previous(mask) if "wait" in step.parts else None


@effect("prefetch")
def _prefetch(step):
    """prefetch: any address is allowed; the cache line is only counted."""
    place = address(step.operands[0])
    return lambda machine, mask: machine.prefetch(place(machine), mask)


@effect("fence")
def _fence(step):
    """Fences: ordinary writes are visible at once here. Only proxy fences for the tensor cores (tiles.py) and
    fence.mbarrier_init (bulk.py) have an effect."""
    if "mbarrier_init" in step.parts:
        return lambda machine, mask: machine.bulk.fence_init(mask) if machine.bulk else None
    shows = "proxy" in step.parts and "async" in step.parts
    return lambda machine, mask: machine.tiles.fence_proxy(mask) if shows and machine.tiles else None


@effect("membar", "prefetchu", "discard", "applypriority", "nanosleep", "pragma")
def _nothing(step):
    """No effect: writes are visible at once, and hints change nothing."""
    return lambda machine, mask: None


@effect("trap", "brkpt")
def _trap(step):
    def run(machine, mask):
        if machine.lanes(mask).size:
            raise Fault("the kernel executes trap or brkpt")
    return run


@effect("cp")
def _copy(step):
    """cp.async: the bytes arrive in shared memory when their lane waits for their group, never earlier."""
    if "bulk" in step.parts:
        return EFFECTS["bulk"](step)
    if "commit_group" in step.parts:
        return lambda machine, mask: machine.commit(mask)
    if "wait_group" in step.parts or "wait_all" in step.parts:
        most = int(step.operands[0].text) if "wait_group" in step.parts else -1
        return lambda machine, mask: machine.complete_copies(step, mask, most)
    if "async" not in step.parts:
        raise Fault(f"no such copy here: {step.text}")
    to, source = (address(operand) for operand in step.operands[:2])
    size = int(constant(step.operands[2].text, np.int64))
    if len(step.operands) > 3:
        raise Fault(f"copies that fill with zeros are not known here: {step.text}")

    def run(machine, mask):
        lanes = machine.lanes(mask)
        if not lanes.size:
            return
        memory, at = machine.check_access(step, "global", source(machine), size, lanes, READ)
        data = memory.bytes[at[:, None] + np.arange(size)]
        machine.start_copy(step, to(machine), data, lanes)
    return run
