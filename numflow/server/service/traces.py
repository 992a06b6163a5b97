"""OpenTelemetry traces: a span per request, with child spans for queue, prefill and decode. Spans contain no text."""

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from numflow.distribution import install
from numflow.engine.run.generation import Generation
from numflow.errors import DeviceError, RequestError
from numflow.server.http.event_loop import Run

OPERATIONS = {"chat": ("/chat/completions", "/responses", "/messages", "/api/chat"),
              "text_completion": ("/completions", "/api/generate", "/infill", "/"),
              "embeddings": ("/embeddings", "/api/embed", "/api/embeddings")}  # gen_ai.operation.name -> routes
PATH = "/v1/traces"  # path of OTLP over HTTP


def operation(route: str) -> str | None:
    """The value of gen_ai.operation.name for a route; None if there is none."""
    return next((name for name, routes in OPERATIONS.items() if route.removeprefix("/v1") in routes), None)


class Traces:
    """Spans of requests, made at the end of a request and exported in a background thread.

    address: URL of a collector for OTLP over HTTP. processor: a span processor to use instead.

    Raises:
        DeviceError: a package is missing. RequestError: the address is invalid.
    """

    def __init__(self, address: str, processor: Any = None):
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise DeviceError(f"traces need {error.name}: {install('traces')}") from None
        if processor is None:
            processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint(address)))
        resource = Resource.create({SERVICE_NAME: "numflow"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._trace, self._context = trace, TraceContextTextMapPropagator()
        self._tracer = self._provider.get_tracer("numflow.server")

    def tell(self, headers: Mapping[str, str], request: Mapping[str, Any], facts: Mapping[str, Any],
             runs: Sequence[Run], begin: float) -> str:
        """Make the spans of a finished request; return its trace id.

        headers: may have a parent span (traceparent). request: method, route, status and error of the answer. facts:
        model, prompt_tokens and new_tokens, if known. begin: time.perf_counter() at the arrival of the request.
        """
        trace, since = self._trace, time.time_ns() - time.perf_counter_ns()

        def ns(seconds: float) -> int:
            return since + int(seconds * 1e9)

        kind, model = operation(request["route"]), facts.get("model")
        name = f"{kind} {model}" if kind and model else f"{request['method']} {request['route']}"
        span = self._tracer.start_span(name, self._context.extract(dict(headers)), trace.SpanKind.SERVER,
                                       _attributes(request, kind, facts, runs), start_time=ns(begin))
        failed_within = request["error"] and request["status"] == 200
        if request["status"] >= 500 or failed_within:  # a client's fault is no error of the span
            span.set_status(trace.Status(trace.StatusCode.ERROR, request["error"] or ""))
        parent = trace.set_span_in_context(span)
        for index, run in enumerate(runs):
            prompt = {"numflow.prompt": index} if len(runs) > 1 else {}
            for phase, start, end in run.phases:
                attributes = {**prompt, **_tokens(phase, run)}
                self._tracer.start_span(phase, parent, attributes=attributes, start_time=ns(start)).end(ns(end))
        span.end()
        return trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Export the remaining spans; takes seconds if the collector does not answer."""
        self._provider.shutdown()


def endpoint(address: str) -> str:
    """The URL for spans: the address, with OTLP's path if it has no path.

    Raises:
        RequestError: it is no HTTP address.
    """
    try:
        found = urlsplit(address)
        good = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        good = False
    if not good:
        raise RequestError(f"traces should be an address such as http://127.0.0.1:4318, is {address!r:.200}")
    return address.rstrip("/") + PATH if found.path in ("", "/") else address


def _attributes(request: Mapping[str, Any], kind: str | None, facts: Mapping[str, Any],
                runs: Sequence[Run]) -> dict[str, Any]:
    """Attributes by OpenTelemetry's semantic conventions for HTTP and for generative AI."""
    found = {"http.request.method": request["method"], "http.route": request["route"],
             "http.response.status_code": request["status"] or None, "numflow.request.id": request["id"],
             "error.type": request["error"]}
    if "model" in facts:
        found |= {"gen_ai.operation.name": kind, "gen_ai.provider.name": "numflow",
                  "gen_ai.request.model": facts["model"], "gen_ai.response.model": facts["model"]}
    if runs:
        asked, results = runs[0].request, [result for run in runs for result in run.results]
        found |= {
            "gen_ai.request.max_tokens": asked.constraints.max_tokens, "gen_ai.request.seed": asked.sampling.seed,
            "gen_ai.request.temperature": asked.sampling.temperature, "gen_ai.request.top_p": asked.sampling.top_p,
            "gen_ai.request.top_k": asked.sampling.top_k or None,
            "gen_ai.request.choice.count": asked.n if asked.n > 1 else None,
            "gen_ai.response.finish_reasons": [_reason(result) for result in results],
            "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.get("new_tokens"),
            "gen_ai.usage.cache_read.input_tokens": sum(run.reused for run in runs)}
    return {name: value for name, value in found.items() if value is not None}


def _reason(result: Generation) -> str:
    return {"stop_string": "stop", None: "cancelled"}.get(result.finish_reason, result.finish_reason or "")


def _tokens(phase: str, run: Run) -> dict[str, int]:
    """Attributes with the tokens of a phase."""
    if phase == "prefill":
        return {"gen_ai.usage.input_tokens": len(run.request.prompt),
                "gen_ai.usage.cache_read.input_tokens": run.reused}
    return {"gen_ai.usage.output_tokens": run.new_tokens} if phase == "decode" else {}
