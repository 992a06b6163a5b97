"""Random requests from the OpenAPI description: no answer is a 5xx, and every error has the same shape."""

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402

from tests.server.processes import ServerProcess  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings from the library
OPERATIONS = ["POST /", "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings",
              "POST /v1/responses", "GET /v1/responses/{id}", "DELETE /v1/responses/{id}",
              "POST /v1/messages", "POST /v1/messages/count_tokens",
              "POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings", "POST /api/show",
              "POST /api/pull", "DELETE /api/delete", "POST /v1/rerank", "POST /v1/score", "POST /v1/classify",
              "POST /infill",
              "GET /v1/models/{id}", "POST /tokenize", "POST /detokenize", "POST /apply-template", "POST /translate",
              "POST /fill-mask"]


@pytest.fixture(scope="module")
def fuzzed(config_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "service.toml"
    path.write_text(config_file.read_text().replace("[service]", "[service]\nrequest_timeout = 2\nmax_choices = 4"))
    with ServerProcess("-c", str(path)) as server:
        yield server
        assert server.wait_idle()["kv_blocks_used"] == 0
        assert "Traceback" not in "".join(server.log), next(line for line in server.log if "Traceback" in line)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_server_errors(fuzzed, name):
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    method, path = name.split(" ")

    @settings(max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
              derandomize=True, database=None)
    @given(case=schema[path][method].as_strategy())
    def ask(case):
        reply = case.call(timeout=60)
        assert reply.status_code < 500 or "retry-after" in reply.headers, reply.content[:500]
        if reply.status_code >= 400:
            facts = reply.json()["error"]
            assert isinstance(facts, str) or {"message", "type", "param", "code"} == set(facts)

    ask()
