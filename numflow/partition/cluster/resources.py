"""Resource requests of a plan's actors to a Ray cluster, checked against its machines.

A CPU device requests one CPU per thread. A GPU device requests a GPU, and one CPU for its thread. If the cluster has
fewer GPUs than the plan has GPU devices, devices share GPUs, as few as possible per GPU: with k devices per GPU, a
group of n devices requests n / k of a GPU, rounded up to whole GPUs above 1, because Ray assigns fractions of one GPU
or whole GPUs.
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
    """Demand of one actor. cpus: number of CPUs. gpus: number of its GPU devices."""

    cpus: float
    gpus: int = 0

    def bundle(self, sharing: int = 1) -> dict[str, float]:
        """The Ray resource bundle, with `sharing` devices per GPU."""
        asked = {"CPU": float(self.cpus)} if self.cpus else {}
        if self.gpus:
            asked["GPU"] = (floor(self.gpus / sharing * PARTS) / PARTS if self.gpus < sharing
                            else float(ceil(self.gpus / sharing)))
        return asked


def needs_of(plan: Plan, threads: int | None) -> list[Need]:
    """Demand of each group of a plan. threads: threads of each CPU device, 1 if None."""
    found = []
    for group in plan.groups:
        on_gpu = sum(plan.devices[index].executor == "cuda" for index in group)
        found.append(Need(on_gpu + (threads or 1) * (len(group) - on_gpu), on_gpu))
    return found


def bundles(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]], what: str) -> list[dict[str, float]]:
    """Resource bundles, each for one machine, with as few devices per GPU as fit.

    nodes: total resources of each machine. what: description of the request for messages.

    Raises:
        DeviceError: the machines are too small even if idle.
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
    """In an actor: the driver's GPU index for each device, by name.

    GPUs are assigned round-robin if there are fewer than devices; {} without GPUs.

    ids:   GPU ids assigned by Ray. shown: the driver sees only these (CUDA_VISIBLE_DEVICES).
    """
    indices = list(range(len(ids))) if shown else [int(each) for each in ids]
    return {name: indices[i % len(indices)] for i, name in enumerate(names)} if indices else {}


def _fit(asked: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether all bundles fit, by best-fit decreasing. Fractions of a GPU must come from one card, so cards are tracked
    individually."""
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
    """Remaining parts of each card after taking `parts` from one card, or whole cards; None if not available."""
    rest = sorted(cards)
    if parts < PARTS:
        place = next((i for i, have in enumerate(rest) if have >= parts), None)
        if not parts or place is None:
            return None if parts else rest
        return [*rest[:place], rest[place] - parts, *rest[place + 1:]]
    whole = parts // PARTS
    return rest[:len(rest) - whole] + [0] * whole if rest.count(PARTS) >= whole else None


def listed(found: Sequence[Mapping[str, float]]) -> str:
    """Text such as "2 x (2 CPUs and 1 GPU), ...", with equal entries counted."""
    texts = [" and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in one.items())
             for one in found]
    return ", ".join(f"{texts.count(text)} x ({text})" for text in dict.fromkeys(texts)) or "none"
