"""Resources that the actors of a plan ask a Ray cluster for, checked against its machines.

A device of the CPU executor asks for a CPU for each of its threads. A device on a GPU asks for a GPU of its own and for
one CPU, which its thread runs on. Where the cluster has fewer GPUs than the plan has such devices, as few of them as
possible share one: with k to a GPU a group of n devices asks for n / k of a GPU, or for whole ones if that is above 1,
since Ray gives parts of one GPU or whole GPUs only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from numflow.errors import DeviceError
from numflow.partition.cut.plan import Plan

PARTS = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class Need:
    """Demand of one actor. cpus: number that it asks for. gpus: number of its devices that are GPUs."""

    cpus: float
    gpus: int = 0

    def bundle(self, sharing: int = 1) -> dict[str, float]:
        """As Ray wants it, with so many devices to a GPU."""
        asked = {"CPU": float(self.cpus)} if self.cpus else {}
        if self.gpus:
            asked["GPU"] = (floor(self.gpus / sharing * PARTS) / PARTS if self.gpus < sharing
                            else float(ceil(self.gpus / sharing)))
        return asked


def needs_of(plan: Plan, threads: int | None) -> list[Need]:
    """Demand of each group of a plan. threads: of each device on a processor, 1 if None."""
    found = []
    for group in plan.groups:
        on_gpu = sum(plan.devices[index].executor == "cuda" for index in group)
        found.append(Need(on_gpu + (threads or 1) * (len(group) - on_gpu), on_gpu))
    return found


def bundles(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]], what: str) -> list[dict[str, float]]:
    """Resource bundles to ask for, each on one machine: with as few devices to a GPU as find room.

    nodes: resources of each machine, all of them. what: is asked for, in a message.

    Raises:
        DeviceError: the machines have too little, even if nothing else runs on them.
    """
    devices = sum(need.gpus for need in needs)
    for sharing in range(1, max(devices, 1) + 1):
        asked = [need.bundle(sharing) for need in needs]
        if _fit(asked, nodes):
            return asked
    asked = [need.bundle() for need in needs]
    raise DeviceError(f"the Ray cluster cannot have room for {what}: asked for {listed(asked)}, each on one machine; "
                      f"its machines have {listed(nodes)}; use fewer devices or threads")


def nodes_of(ray: Any) -> list[dict[str, float]]:
    """CPUs and GPUs of each machine of the cluster."""
    found = [{name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}
             for node in ray.nodes() if node["Alive"]]
    return sorted(found, key=lambda node: (node["GPU"], node["CPU"]))


def visible_gpus(names: Sequence[str], ids: Sequence[Any], shown: bool = True) -> dict[str, int]:
    """In an actor: the GPU of each of its devices, by name, as the driver counts them there.

    GPUs begin again where there are fewer than devices; nothing if there are none.

    ids:   GPUs that Ray has given the actor. shown: the driver shows these and no others (CUDA_VISIBLE_DEVICES).
    """
    numbers = list(range(len(ids))) if shown else [int(number) for number in ids]
    return {name: numbers[place % len(numbers)] for place, name in enumerate(names)} if numbers else {}


def _fit(asked: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether the largest first, each on the machine that has the least left for it, all find room. Parts of a GPU come
    from one card: a machine's are counted one by one."""
    left = [(node.get("CPU", 0.0), [PARTS] * int(node.get("GPU", 0))) for node in nodes]
    for bundle in sorted(asked, key=lambda bundle: (-bundle.get("GPU", 0.0), -bundle.get("CPU", 0.0))):
        cpus, gpus = bundle.get("CPU", 0.0), round(bundle.get("GPU", 0.0) * PARTS)
        able = [(sum(cards), have, i) for i, (have, cards) in enumerate(left)
                if have >= cpus and _cards(cards, gpus) is not None]
        if not able:
            return False
        _, have, best = min(able)
        left[best] = have - cpus, _cards(left[best][1], gpus) or []
    return True


def _cards(cards: Sequence[int], parts: int) -> list[int] | None:
    """Parts left of each card after taking so many, from one card or as whole cards; None: there are not enough."""
    rest = sorted(cards)
    if parts < PARTS:
        place = next((i for i, have in enumerate(rest) if have >= parts), None)
        if not parts or place is None:
            return None if parts else rest
        return [*rest[:place], rest[place] - parts, *rest[place + 1:]]
    whole = parts // PARTS
    return rest[:len(rest) - whole] + [0] * whole if rest.count(PARTS) >= whole else None


def listed(found: Sequence[Mapping[str, float]]) -> str:
    """ "2 CPUs and 1 GPU, ..." of each, the same ones counted."""
    texts = [" and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in one.items())
             for one in found]
    return ", ".join(f"{texts.count(text)} x ({text})" for text in dict.fromkeys(texts)) or "none"
