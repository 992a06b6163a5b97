"""Requests made at random from the OpenAPI description: no answer is a 5xx, and every error has the one shape."""

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, settings  # noqa: E402

from tests.server.processes import ServerProcess  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of the library's own
schema = schemathesis.pytest.from_fixture("described")


@pytest.fixture(scope="module")
def fuzzed(config_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "service.toml"
    path.write_text(config_file.read_text().replace("[service]", "[service]\nrequest_timeout = 2\nmax_choices = 4"))
    with ServerProcess("-c", str(path)) as server:
        yield server
        assert server.wait_idle()["kv_blocks_used"] == 0
        assert "Traceback" not in "".join(server.log), [line for line in server.log if "Traceback" in line][0]


@pytest.fixture
def described(fuzzed):
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


@schema.parametrize()
@settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_no_server_errors(case):
    reply = case.call(timeout=60)
    assert reply.status_code < 500 or (reply.status_code, reply.headers.get("retry-after") is None) == (503, False), \
        reply.content[:500]
    if reply.status_code >= 400:
        assert {"message", "type", "param", "code"} == set(reply.json()["error"])
