"""A device's steps grouped by equal cost, so that equal layers are priced once."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from numflow.ops import CACHES, EXCHANGES, Network, Step, Weight

Stretch = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Outline:
    """An entry of a device's part.

    kinds:  one step of each kind. Steps of a kind have the same cost for every load.
    pieces: distinct pieces of the device's work: an exchange as an index into `kinds`, or the steps between two
    exchanges
            as (index into `kinds`, count) pairs, in order of first appearance.
    order:  indices into `pieces`, in execution order.
    """

    kinds: tuple[Step, ...]
    pieces: tuple[int | Stretch, ...]
    order: tuple[int, ...]


def outline(network: Network, entry: str, weigh: Callable[[Weight], float],
            name_of: Callable[[Step], str] | None = None) -> Outline:
    """The outline of an entry.

    weigh: bytes of a weight. name_of: steps with different names are different kinds; None: names are ignored.
    """
    weights = {name: (weigh(weight), weight.shape, weight.groups) for name, weight in network.weights.items()}
    caches = {name: (cache.kv_heads, cache.k_dim, cache.v_dim, cache.kind, cache.prefix, cache.every)
              for name, cache in network.caches.items()}
    kinds: dict[Hashable, int] = {}
    steps: list[Step] = []
    items: list[int | Stretch] = []
    between: dict[int, int] = {}
    for step in network.entries[entry]:
        # All inputs of network.cost and of exchange prices; a view's buffer determines its rows.
        key = (step.op, tuple([(view.buffer, view.width) for view in step.inputs]),
               tuple([(view.buffer, view.width) for view in step.outputs]),
               tuple([(role, weights[name]) for role, name in step.weights.items()]),
               tuple([(name, caches.get(value) if name in CACHES else value)
                      for name, value in step.params.items()]),
               name_of(step) if name_of else None)
        kind = kinds.setdefault(key, len(steps))
        if kind == len(steps):
            steps.append(step)
        if step.op not in EXCHANGES:
            between[kind] = between.get(kind, 0) + 1
            continue
        items += [tuple(between.items()), kind] if between else [kind]
        between = {}
    items += [tuple(between.items())] if between else []
    pieces = {item: index for index, item in enumerate(dict.fromkeys(items))}
    return Outline(tuple(steps), tuple(pieces), tuple(pieces[item] for item in items))
