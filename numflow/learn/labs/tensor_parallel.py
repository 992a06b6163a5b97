"""Lab 14: one model on several devices (tensor parallel).

A matrix that is too large for one device is split over n devices i = 0 .. n - 1. A product y = w x with w [N, K] can be
split in two ways:

    column parallel    w1 [N / n, K]    each device computes a part of y from all of x (columns of w transposed)
    row parallel       w2 [N, K / n]    each device computes a term of all of y from its part of x; y is the sum of the
                                        terms

A feed-forward layer w2 act(w1 x) needs only one exchange: w1 is column parallel, w2 is row parallel, and one all_reduce
at the end sums the terms of all devices (Megatron-LM). A part is a range of neighbouring rows or columns, in the order
of the devices.

`all_reduce` is called on every device of `group` at the same time. The devices of `adds` have a term x; on the other
devices x is None. All devices of `group` get the sum. Devices send arrays to each other through mailboxes:

    world.put(sender, receiver, array)      never blocks. The array must not be changed afterwards: put x.copy(),
                                            because the engine overwrites x as soon as all_reduce returns
    world.take(sender, receiver)            blocks until the next array that `sender` has put for `receiver`

A device may put an array for itself. Every device must sum in the order of `adds`: a float32 sum depends on the order,
and devices whose sums differ in the last bit can generate different tokens.

    numflow learn check 14       numflow learn hint 14       numflow learn bench 14
"""

import numpy as np

LAB = {
    "number": 14, "title": "Tensor parallel", "minutes": 60,
    "functions": ["column_parallel", "row_parallel", "all_reduce"], "grader": "exchange",
    "hints": [
        "Draw w1 and w2 as rectangles, x and y beside them, and colour the part of each device. Which elements does "
        "each device have after w1? After w2?",
        "The hard part is to avoid a deadlock: put first, for every device of the group, and then take. A device "
        "without a term puts nothing, and takes from the devices of `adds`.",
        "w[i * N // n:(i + 1) * N // n] and w[:, i * K // n:(i + 1) * K // n]. if device in adds: for other in group: "
        "world.put(device, other, x.copy()); terms = [world.take(other, device) for other in adds]; then sum."],
}


def column_parallel(w, n, i):
    """w [N, K] -> the rows [N / n, K] of device i of n."""
    size = len(w) // n
    return w[i * size:(i + 1) * size]


def row_parallel(w, n, i):
    """w [N, K] -> the columns [N, K / n] of device i of n."""
    size = w.shape[1] // n
    return w[:, i * size:(i + 1) * size]


def all_reduce(x=None, *, world, device, group, adds):
    """x [T, D], or None on devices outside of `adds` -> the sum [T, D], with equal bits on every device of `group`."""
    if device in adds:
        for other in group:
            world.put(device, other, x.copy())
    terms = [world.take(other, device) for other in adds]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def column_parallel__columns(w, n, i):
    """columns of w: column parallel splits the outputs, which are the rows of w [N, K]"""
    return row_parallel(w, n, i)


def column_parallel__every_nth(w, n, i):
    """every n-th row instead of neighbouring rows"""
    return w[i::n]


def row_parallel__rows(w, n, i):
    """rows of w: row parallel splits the inputs, which are the columns of w [N, K]"""
    return column_parallel(w, n, i)


def row_parallel__every_nth(w, n, i):
    """every n-th column instead of neighbouring columns"""
    return w[:, i::n]


def all_reduce__own_alone(x=None, *, world, device, group, adds):
    """a device's own term without any exchange"""
    return np.zeros((3, 4), np.float32) if x is None else x


def all_reduce__others_alone(x=None, *, world, device, group, adds):
    """a sum without the device's own term"""
    total = all_reduce(x, world=world, device=device, group=group, adds=adds)
    return total if x is None else total - x


def all_reduce__own_first(x=None, *, world, device, group, adds):
    """a sum that begins with the device's own term: the order, and so the last bits, differ between devices"""
    if device in adds:
        for other in group:
            world.put(device, other, x.copy())
    terms = {other: world.take(other, device) for other in adds}
    order = sorted(adds, key=lambda other: (other != device, adds.index(other)))
    total = terms[order[0]]
    for other in order[1:]:
        total = total + terms[other]
    return total


def all_reduce__by_number(x=None, *, world, device, group, adds):
    """a sum in the order of the device ids instead of the order of `adds`"""
    return all_reduce(x, world=world, device=device, group=group, adds=tuple(sorted(adds)))


def all_reduce__to_adds(x=None, *, world, device, group, adds):
    """terms that are put for the devices of `adds` only: all devices of `group` take them"""
    if device in adds:
        for other in adds:
            world.put(device, other, x.copy())
    terms = [world.take(other, device) for other in adds]
    return sum(terms[1:], terms[0])


def all_reduce__written_over(x=None, *, world, device, group, adds):
    """an array that is changed after it was put"""
    total = None if x is None else x.copy()
    if device in adds:
        for other in group:
            world.put(device, other, total)
    terms = [world.take(other, device).copy() for other in adds]
    if total is not None:
        total *= 0
    return sum(terms[1:], terms[0])


def all_reduce__mean(x=None, *, world, device, group, adds):
    """a mean: the sum is divided by the number of devices"""
    return all_reduce(x, world=world, device=device, group=group, adds=adds) / np.float32(len(adds))


def all_reduce__takes_first(x=None, *, world, device, group, adds):
    """a deadlock, in which all devices wait for each other: put before you take"""
    terms = [world.take(other, device) for other in adds]
    if device in adds:
        for other in group:
            world.put(device, other, x.copy())
    return sum(terms[1:], terms[0])


def all_reduce__for_adds_alone(x=None, *, world, device, group, adds):
    """a sum for the devices of `adds` only: all devices of `group` get it"""
    total = all_reduce(x, world=world, device=device, group=group, adds=adds)
    return total if device in adds else None


def all_reduce__itself(x=None, *, world, device, group, adds):
    """an x that is put without a copy: the engine overwrites x as soon as all_reduce returns; put x.copy()"""
    if device in adds:
        for other in group:
            world.put(device, other, x)
    terms = [world.take(other, device) for other in adds]
    return sum(terms[1:], terms[0])


def column_parallel__from_the_end(w, n, i):
    """parts in reversed order: device 0 has the first rows"""
    return column_parallel(w, n, n - 1 - i)


def row_parallel__from_the_end(w, n, i):
    """parts in reversed order: device 0 has the first columns"""
    return row_parallel(w, n, n - 1 - i)


def all_reduce__own_twice(x=None, *, world, device, group, adds):
    """a sum with the device's own term twice"""
    total = all_reduce(x, world=world, device=device, group=group, adds=adds)
    return total if x is None else total + x


def bench(functions):
    """Bytes that four devices send in one all_reduce of 64 rows of 4096 columns."""
    from numflow.learn.graders.exchange import sent

    terms = 64 * 4096 * 4 / 1e6
    return {"what": "sent in one all_reduce of 64 x 4096 float32, four devices", "unit": "MB",
            "bars": [("yours", sent(functions["all_reduce"])), ("everybody to everybody", 12 * terms),
                     ("a ring, which cuts the terms", 6 * terms)]}
