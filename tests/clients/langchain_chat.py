"""LangChain's chat model of OpenAI."""

from importlib.metadata import version

from checks import ASKED, KEY, MODEL, PLACE, QUESTION, TOLD, URL, WEATHER, is_call, is_place, tell
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=60,
                   timeout=300)


def conversation():
    first = model.invoke([HumanMessage(QUESTION)])
    assert model.invoke([HumanMessage(QUESTION), first, HumanMessage("And goodbye.")]).content


def stream():
    parts = [part.content for part in model.stream(QUESTION)]
    assert len(parts) > 2 and "".join(parts) == model.invoke(QUESTION).content


def tool():
    bound = model.bind_tools([{"type": "function", "function": WEATHER}], tool_choice="required")
    first = bound.invoke(ASKED)
    call = first.tool_calls[0]
    is_call(call["name"], call["args"])
    assert isinstance(first, AIMessage)
    assert model.invoke([HumanMessage(ASKED), first, ToolMessage(TOLD, tool_call_id=call["id"])]).content


def structured():
    is_place(model.with_structured_output({"title": "Place", "description": "a city", **PLACE},
                                          method="json_schema").invoke("Name a city."))


tell(version("langchain-openai"), conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
