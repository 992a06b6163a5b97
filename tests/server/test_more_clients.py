"""Programs made for other services, with this service: instructor and LangChain."""

import json

import pytest

from tests.server import tiny
from tests.server.processes import KEY, ServerProcess
from tests.server.test_openai_client import WEATHER

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings from the libraries

CALL = r'<tool_call>\{"name": "weather", "arguments": \{"city": "Rome", "days": 1\}\}</tool_call>'


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A service whose model has room for the long prompts of such programs."""
    root = tmp_path_factory.mktemp("roomy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CONTEXT", 4096)
        folder = tiny.write_chat_model(root / "model")
    config = root / "service.toml"
    config.write_text(f'[engine]\nbackend = "reference"\n[models."org/chat"]\npath = "{folder}"\n')
    with ServerProcess("-c", str(config)) as server:
        yield server.url


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(url, mode):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")

    class Day(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str = pydantic.Field(max_length=4)

    class Plan(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        good: bool
        day: Day  # becomes a $ref in the schema

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
        found = client.chat.completions.create(
            model="org/chat", response_model=Plan, max_retries=0, temperature=1, seed=3, max_tokens=200,
            messages=[{"role": "user", "content": "hi"}])
    assert isinstance(found, Plan) and len(found.day.name) <= 4


def test_langchain_openai(url):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="org/chat", base_url=f"{url}/v1", api_key=KEY, max_retries=0,
                                 temperature=0, max_tokens=60)
    whole = model.invoke("hi")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in model.stream("hi")) == whole.content
    call, = model.bind_tools([WEATHER]).bind(
        max_tokens=200, extra_body={"regex": CALL}).invoke("hi").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome", "days": 1})
    schema = {"title": "Weather", "description": "x", **WEATHER["function"]["parameters"]}
    free = langchain.ChatOpenAI(model="org/chat", base_url=f"{url}/v1", api_key=KEY, max_retries=0, temperature=1,
                                seed=1, max_tokens=150)
    for method in ("json_schema", "function_calling"):
        assert set(free.with_structured_output(schema, method=method).invoke("hi")) == {"city", "days"}
    responses = langchain.ChatOpenAI(model="org/chat", base_url=f"{url}/v1", api_key=KEY, max_retries=0,
                                     temperature=0, max_tokens=60, use_responses_api=True)
    assert responses.invoke("hi").text == whole.content


def test_langchain_ollama(url):
    langchain = pytest.importorskip("langchain_ollama")
    model = langchain.ChatOllama(model="org/chat", base_url=url, temperature=0, num_predict=20)
    whole = model.invoke("hi")
    assert whole.content and whole.response_metadata["done_reason"] == "length"
    assert "".join(part.content for part in model.stream("hi")) == whole.content
    found = langchain.ChatOllama(model="org/chat", base_url=url, temperature=1, seed=4, num_predict=150,
                                 format=WEATHER["function"]["parameters"]).invoke("hi")
    assert set(json.loads(found.content)) == {"city", "days"}
