"""OpenAI's client: embeddings."""

import os

import openai
from checks import KEY, URL, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)


def alike():
    found = client.embeddings.create(model=os.environ["CLIENT_EMBEDDER"], input=["a cat", "a kitten", "a tax form"])
    cat, kitten, form = (entry.embedding for entry in found.data)
    assert sum(a * b for a, b in zip(cat, kitten)) > sum(a * b for a, b in zip(cat, form))
    return "embeddings"


tell(openai.__version__, conversation=alike, stream=lambda: "-", tool_call_with_result=lambda: "-",
     structured_answer=lambda: "-")
