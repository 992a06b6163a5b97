"""instructor: TOOLS and JSON_SCHEMA."""

from importlib.metadata import version
from typing import Annotated

import instructor
import openai
import pydantic
from checks import KEY, MODEL, QUESTION, URL, tell

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
MORE = {"model": MODEL, "max_tokens": 400, "max_retries": 0}


class Place(pydantic.BaseModel, extra="forbid"):
    name: Annotated[str, pydantic.Field(max_length=12)]
    large: bool


def client(mode):
    return instructor.from_openai(plain, mode=getattr(instructor.Mode, mode)).chat.completions


def asked(mode):
    found = client(mode).create(response_model=Place, messages=[{"role": "user", "content": "Name a city."}], **MORE)
    assert isinstance(found, Place)


def conversation():
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "Name a city."}]
    assert isinstance(client("TOOLS").create(response_model=Place, messages=messages, **MORE), Place)


def stream():
    parts = list(client("JSON_SCHEMA").create_partial(response_model=Place, messages=[
        {"role": "user", "content": "Name a city."}], **MORE))
    assert isinstance(parts[-1].large, bool) and len(parts) > 2


tell(version("instructor"), conversation=conversation, stream=stream, tool_call_with_result=lambda: asked("TOOLS"),
     structured_answer=lambda: asked("JSON_SCHEMA"))
