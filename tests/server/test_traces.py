"""OpenTelemetry traces: spans of requests are sent to a collector; nothing is sent without the option."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from numflow.errors import DeviceError, RequestError
from numflow.server.app import ENDPOINTS
from numflow.server.config.config import make_config
from numflow.server.service import traces
from numflow.server.service.traces import Traces, endpoint, operation
from tests.server.processes import ServerProcess
from tests.waiting import until

httpx = pytest.importorskip("httpx")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Receives OTLP over HTTP on loopback. spans: name -> the latest span of that name."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans, self.services, self.paths = {}, set(), set()
        self.spans, ours = spans, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.headers.get("content-encoding") in (None, "none", "identity")
                asked = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                ours.paths.add(self.path)
                for resource in asked.resource_spans:
                    ours.services |= {a.value.string_value for a in resource.resource.attributes
                                      if a.key == "service.name"}
                    spans.update((span.name, span) for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def values(span):
    """Attributes of a span as received."""
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        found[one.key] = getattr(one.value, kind) if kind != "array_value" else [
            value.string_value for value in one.value.array_value.values]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.merge
def test_a_collector_gets_the_spans_of_a_request(model_folders, stream):
    with Collector() as collector, ServerProcess(
            "-m", f"m={model_folders['chat']}", "--device", "reference", "--traces", collector.url,
            OTEL_BSP_SCHEDULE_DELAY="50") as server:
        asked = {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 5, "temperature": 0.5,
                 "stream": stream}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers={"traceparent": PARENT})
        assert reply.status_code == 200
        until(lambda: "chat m" in collector.spans, "a span", 30)
        spans = collector.spans
        assert collector.services == {"numflow"} and collector.paths == {"/v1/traces"}
        assert set(spans) == {"chat m", "queue", "prefill", "decode"}
        whole = spans["chat m"]
        assert whole.trace_id.hex() == PARENT[3:35] and whole.parent_span_id.hex() == PARENT[36:52]
        found = values(whole)
        assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "m"
        assert found["gen_ai.usage.output_tokens"] == 5 and found["gen_ai.request.temperature"] == 0.5
        assert found["gen_ai.response.finish_reasons"] == ["length"] and found["http.route"] == "/v1/chat/completions"
        assert found["numflow.request.id"] == reply.headers["x-request-id"]
        phases = [spans[name] for name in ("queue", "prefill", "decode")]
        assert all(span.parent_span_id == whole.span_id and span.trace_id == whole.trace_id for span in phases)
        times = [whole.start_time_unix_nano]
        for span in phases:
            assert times[-1] <= span.start_time_unix_nano <= span.end_time_unix_nano
            times.append(span.end_time_unix_nano)
        assert times[-1] <= whole.end_time_unix_nano
        assert values(phases[1])["gen_ai.usage.input_tokens"] == found["gen_ai.usage.input_tokens"]
        assert "secret" not in str(spans) and any(f'"trace": "{PARENT[3:35]}"' in line for line in server.log)
        wrong = httpx.post(f"{server.url}/v1/completions", json={"prompt": 5})
        assert wrong.status_code == 400
        until(lambda: "POST /v1/completions" in spans, "the span of a refusal", 30)
        assert values(spans["POST /v1/completions"])["http.response.status_code"] == 400
        httpx.get(f"{server.url}/health")
        assert server.stop() == 0
        assert len(spans) == 5


@pytest.mark.merge
def test_a_collector_that_is_not_there_stops_nothing(model_folders):
    with ServerProcess("-m", f"m={model_folders['chat']}", "--device", "reference", "--traces",
                       "http://127.0.0.1:9/own/path", OTEL_BSP_SCHEDULE_DELAY="50") as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 200
        assert server.stop(seconds=60) == 0


def test_every_request_in_memory(model_folders):
    """A queued request, a request with several prompts, and a cancelled request."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    import numflow
    from numflow import Engine
    from numflow.engine.run.job import Job

    memory = InMemorySpanExporter()
    made = Traces("http://127.0.0.1:9", SimpleSpanProcessor(memory))

    class Seen:  # the attributes of Run that traces use
        def __init__(self, job: Job):
            self.request, self.phases, self.results = job.request, job.phases, job.results
            self.reused, self.new_tokens = job.group.reused, sum(len(result.ids) for result in job.results)

    with numflow.load(model_folders["chat"], backend="reference") as model, Engine(model, max_batch=1) as engine:
        jobs = [engine.start(engine.request(text, max_tokens=count, ignore_eos=True), 1, 0, lambda piece: None)
                for text, count in (("one", 30), ("two", 3), ("three", 400))]
        engine.model.core.cancel(jobs[2])
        for job in jobs:
            assert job.done.wait(60)
        request = {"method": "POST", "route": "/v1/completions", "status": 200, "error": None, "id": "r"}
        made.tell({}, request, {"model": "m", "prompt_tokens": 6, "new_tokens": 6}, [Seen(job) for job in jobs], 0.0)
    spans = memory.get_finished_spans()
    assert [span.name for span in spans] == ["queue", "prefill", "decode"] * 2 + ["queue", "text_completion m"]
    assert [span.attributes["numflow.prompt"] for span in spans[:-1]] == [0] * 3 + [1] * 3 + [2]
    assert spans[3].end_time >= spans[2].end_time > spans[2].start_time  # the second one waited for the first
    assert spans[-1].parent is None
    assert spans[-1].attributes["gen_ai.response.finish_reasons"] == ("length", "length", "cancelled")
    made.close()


def test_names_are_those_of_the_conventions():
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
    from opentelemetry.semconv.attributes import error_attributes, http_attributes

    known = {value for module in (names, error_attributes, http_attributes) for value in vars(module).values()
             if isinstance(value, str)}
    with open(traces.__file__, encoding="utf-8") as file:
        own = {word for word in file.read().split('"') if word.startswith(("gen_ai.", "http.", "error."))}
    assert own and own <= known, own - known
    assert set(traces.OPERATIONS) <= {one.value for one in names.GenAiOperationNameValues}


def test_routes_by_what_they_do():
    found = {path: operation(path) for one in ENDPOINTS if one.method == "POST" for path in one.paths}
    assert {path for path, what in found.items() if what == "chat"} == {
        "/v1/chat/completions", "/chat/completions", "/v1/responses", "/responses", "/v1/messages", "/api/chat"}
    assert {path for path, what in found.items() if what == "text_completion"} == {
        "/v1/completions", "/completions", "/api/generate", "/infill", "/"}
    assert {path for path, what in found.items() if what == "embeddings"} == {
        "/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings"}


@pytest.mark.parametrize("address", ["", "localhost:4318", "ftp://a", "http://", "http://a:b", "http://a:0"])
def test_an_address_that_is_none(address):
    with pytest.raises(RequestError, match="such as http://127"):
        endpoint(address)


def test_an_address_with_and_without_a_path():
    assert endpoint("http://a:4318") == endpoint("http://a:4318/") == "http://a:4318/v1/traces"
    assert endpoint("https://a/b") == "https://a/b"


def test_without_the_extra_a_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(DeviceError, match=r"traces need opentelemetry.*pip install 'numflow-llm\[traces\]'"):
        Traces("http://127.0.0.1:9")


def test_nothing_is_imported_without_the_option(model_folders):
    config = make_config({"models": {"m": {"path": str(model_folders["chat"])}}})
    assert config.traces is None
    code = ("import sys\nfrom numflow.server.config.config import make_config\nimport numflow.server.listen\n"
            "from numflow.server.service.service import Service\n"
            f"Service(make_config({{'models': {{'m': {{'path': {str(model_folders['chat'])!r}}}}}}}))\n"
            "assert not [name for name in sys.modules if name.startswith('opentelemetry')]")
    subprocess.run([sys.executable, "-c", code], check=True)
