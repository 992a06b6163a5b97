"""Merge the metrics of several processes into one text for Prometheus."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def merged(front: str, replicas: Iterable[str]) -> str:
    """The front's metrics unchanged, and the metrics of each replica with a label `replica`: 0, 1, ..."""
    found: dict[str, Metric] = {}
    for replica, text in enumerate([front, *replicas], start=-1):
        for family in text_string_to_metric_families(text):
            metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                replica_label = {} if replica < 0 else {"replica": str(replica)}
                metric.add_sample(sample.name, {**sample.labels, **replica_label}, sample.value, sample.timestamp)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Kept(found))
    return generate_latest(registry).decode()


class _Kept:
    """A collector of given metrics."""

    def __init__(self, families: dict[str, Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics (called by the registry)."""
        yield from self._families.values()
