"""Metrics of the service for Prometheus."""

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from numflow.engine.run.generation import Piece
from numflow.server.http.event_loop import Run
from numflow.server.models.pool import ModelPool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# name in Engine.stats -> (name of the metric, whether it is a counter, help text)
ENGINE = {
    "running": ("requests_running", False, "Running requests."),
    "waiting": ("requests_waiting", False, "Requests in the queue."),
    "sequences": ("sequences_running", False, "Running sequences."),
    "kv_blocks_used": ("kv_blocks_used", False, "KV blocks in use."),
    "kv_blocks_cached": ("kv_blocks_cached", False, "KV blocks that only the prefix cache holds."),
    "kv_blocks_capacity": ("kv_blocks_capacity", False, "Reserved KV blocks."),
    "kv_bytes": ("kv_bytes", False, "Memory reserved for the KV cache."),
    "steps": ("steps", True, "Steps of the engine."),
    "cancelled": ("requests_cancelled", True, "Requests that were cancelled before the end of their text."),
    "prompt_tokens": ("prefix_queried_tokens", True, "Prompt tokens that were looked up in the prefix cache."),
    "prefix_tokens": ("prefix_hit_tokens", True, "Prompt tokens found in the prefix cache."),
}


class Metrics:
    """Counters and histograms of one service, and the engines' statistics at the time of a scrape."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, pool: ModelPool):
        disable_created_metrics()  # no line with the creation time of each series
        self._registry, self._pool = CollectorRegistry(), pool

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"numflow_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"numflow_{name}_seconds", text, ("model",), registry=self._registry, buckets=SECONDS)

        self.requests = counter("http_requests", "Requests, by route and status.", "path", "status")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.new_tokens = counter("generated_tokens", "Tokens generated.", "model")
        self.first = histogram("time_to_first_token", "From a request's arrival to its first token.")
        self.between = histogram("inter_token", "From one token to the next.")
        self.total = histogram("request", "From a request's arrival to its last token.")
        self._registry.register(self)
        self._average: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """The engines' statistics (called by the registry)."""
        failing, loaded = self._pool.failing(), self._pool.loaded()
        found = [(served.name, served.engine.stats) for served in loaded
                 if served.engine is not None and served.name not in failing]
        up = GaugeMetricFamily("numflow_model_up", "1 while a model can answer, 0 once its device has died.",
                               labels=("model",))
        for name in {*failing, *(served.name for served in loaded)}:
            up.add_metric((name,), int(name not in failing))
        yield up
        for key, (name, grows, text) in ENGINE.items():
            kind = CounterMetricFamily if grows else GaugeMetricFamily
            family = kind(f"numflow_{name}", text, labels=("model",))
            for model, stats in found:
                family.add_metric((model,), stats.get(key, 0))
            yield family

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def took(self, model: str, seconds: float) -> None:
        """Record the duration of a request of a model."""
        self.total.labels(model).observe(seconds)
        self._average[model] = 0.9 * self._average.get(model, seconds) + 0.1 * seconds

    def seconds_per_request(self, model: str) -> int:
        """Retry-After in seconds for a full queue: a moving average of request durations, 1 .. 60."""
        return max(1, min(60, round(self._average.get(model, 1.0))))


class Watch:
    """Measures the times of one request."""

    def __init__(self, metrics: Metrics, model: str):
        self._metrics, self._model, self._begin = metrics, model, time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}
        self._ended = False
        self._first = metrics.first.labels(model)
        self._between = metrics.between.labels(model)

    def came(self, run: Run, pieces: Sequence[Piece]) -> None:
        """Record pieces of a run that arrived together. Their tokens share the time since the last token."""
        now = time.perf_counter()
        counts: dict[int, int] = {}
        for piece in pieces:
            if piece.id is not None:
                counts[piece.index] = counts.get(piece.index, 0) + 1
        for index, count in counts.items():
            last = self._last.get((id(run), index))
            if last is None:
                self._first.observe(now - self._begin)
                count -= 1
            for _ in range(count):
                self._between.observe((now - (last or now)) / count)
            self._last[id(run), index] = now

    def end(self, prompt_tokens: int, runs: Sequence[Run]) -> None:
        """Record the end of the request; may be called twice."""
        if self._ended:
            return
        self._ended = True
        self._metrics.prompt_tokens.labels(self._model).inc(prompt_tokens if runs else 0)
        self._metrics.new_tokens.labels(self._model).inc(sum(run.new_tokens for run in runs))
        if runs:
            self._metrics.took(self._model, time.perf_counter() - self._begin)
