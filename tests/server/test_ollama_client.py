"""Ollama's own client against a real service."""

import pytest

from tests.server.test_ollama import CALL, GREEDY, HI
from tests.server.test_openai_client import WEATHER

ollama = pytest.importorskip("ollama")


@pytest.fixture(scope="module")
def client(server):
    made = ollama.Client(host=server.url)
    yield made
    made._client.close()  # the client has no close method


def test_a_conversation_and_its_stream(client):
    whole = client.chat("org/chat", HI, options=GREEDY)
    assert whole.done and whole.done_reason == "length" and whole.eval_count == 20
    parts = list(client.chat("org/chat", HI, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content and parts[-1].done
    made = client.generate("org/chat", "hi", options=GREEDY)
    assert made.response == whole.message.content


def test_a_structured_answer(client):
    schema = WEATHER["function"]["parameters"]
    found = client.chat("org/chat", HI, format=schema, options={"temperature": 1, "seed": 4, "num_predict": 120})
    assert '"city":' in found.message.content


def test_a_function_of_python_is_a_tool(client, http):
    def weather(city: str, days: int) -> str:
        """Tells the weather.

        Args:
            city: Where.
            days: How many.
        """
        return "sunny"

    found = client.chat("org/chat", HI, tools=[weather], options=GREEDY)
    assert found.message.role == "assistant"
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    after = client.chat("org/chat", [*HI, {"role": "assistant", "tool_calls": [call]},
                                     {"role": "tool", "content": "sunny", "tool_name": "weather"}], options=GREEDY)
    assert after.eval_count == 20
    reply = http.post("/api/chat", json={"messages": HI, "tools": [WEATHER], "regex": CALL, "stream": False,
                                         "options": {"temperature": 0, "num_predict": 200}})
    assert ollama.ChatResponse(**reply.json()).message.tool_calls[0].function.arguments == {"city": "Rome", "days": 1}


def test_models(client):
    assert client.list().models[0].model == "org/chat:latest"
    assert client.show("org/chat").capabilities == ["completion", "tools", "thinking"]
    assert client.ps().models[0].details.format == "safetensors"
    assert client.pull("org/chat").status == "success"
    assert [part.status for part in client.pull("org/chat", stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="no model"):
        client.show("other")
