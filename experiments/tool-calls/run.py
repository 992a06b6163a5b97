"""Tool calls in the generic format: share of valid calls of a model that was not trained for tools.

A call is valid if it can be parsed and fits the schema of its function. Each question is asked once with each function,
which must be called (tool_choice), and once with all functions, of which the model may call any or none. The service's
code makes the requests and parses the answers.
"""

import json
from enum import StrEnum
from typing import Annotated, Literal

OPTIONS = {"model": "smollm2-135m-instruct", "questions": 200, "batch": 16, "max_tokens": 200, "threads": 0,
           "backend": "cpu"}
TOPICS = ("Rome", "a red bicycle", "my sister", "the river", "next Tuesday", "chess", "a cup of tea", "Mars",
          "the train to Oslo", "a broken lamp")
QUESTIONS = ("What is the weather for {}?", "Book something for {}.", "Find three books about {}.", "Remind me of {}.",
             "How much does {} cost?", "Translate '{}' into French.", "Who has seen {}?", "Buy two of {}.",
             "Write a \"short\" note on {}.", "Is {} far away?", "Turn {} off.", "Compare {} with a dog.",
             "Say {{\"topic\": \"{}\"}} in JSON.", "Plan a day with {}.", "Rate {} from 1 to 5.", "Call {}\nnow!",
             "¿Dónde está {}?", "Sing about {} 🎵.", "Count {} backwards.", "Forget {} and answer in prose.")


def models():
    """Name -> model of a function's arguments."""
    from pydantic import BaseModel, Field

    short = Annotated[str, Field(max_length=16)]

    class Unit(StrEnum):
        celsius, kelvin = "celsius", "kelvin"

    class Weather(BaseModel, extra="forbid"):
        city: short
        unit: Unit

    class Search(BaseModel, extra="forbid"):
        words: Annotated[list[short], Field(min_length=1, max_length=3)]
        limit: Annotated[int, Field(ge=1, le=50)]
        exact: bool = False

    class Place(BaseModel, extra="forbid"):
        name: short
        east: Annotated[float, Field(ge=-180, le=180)]

    class Route(BaseModel, extra="forbid"):
        start: Place
        end: Place
        by: Literal["foot", "train"] | None

    class Remind(BaseModel, extra="forbid"):
        day: Annotated[str, Field(pattern=r"^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$")]
        text: short
        times: Annotated[list[int], Field(max_length=2)] = []

    class Lamp(BaseModel, extra="forbid"):
        on: bool
        colour: short | Annotated[int, Field(ge=0, le=255)]

    return {"weather": Weather, "search": Search, "route": Route, "remind": Remind, "lamp": Lamp}


def run(lab):
    from pathlib import Path

    from numflow import registry
    from numflow.server.config.config import make_config
    from numflow.server.models.served import Served

    if lab.quick:
        lab.options |= {"questions": 2, "batch": 4}
    options, path = lab.options, Path(registry.resolve(lab.options["model"]))
    options["model"] = path.name  # no paths in the report
    how = {"path": str(path), "backend": options["backend"], "max_concurrent_queries": options["batch"]}
    config = make_config({"models": {"m": how | ({"threads": options["threads"]} if options["threads"] else {})}})
    served = Served(config.models[0], 1 << 16)
    try:
        lab.doubt(not served.template_tools, f"{options['model']} has a template for tools of its own")
        found = asked(lab, served, options)
    finally:
        served.close()
    lab.results |= {"calls": found}
    report(lab, found, options)


def asked(lab, served, options) -> dict[str, dict[str, int]]:
    """Counts of the forced calls of each function, and under "free" of voluntary calls."""
    forms = models()
    texts = [question.format(topic) for topic in TOPICS for question in QUESTIONS][:options["questions"]]
    tools = {name: {"type": "function", "function": {"name": name, "description": f"{name} of something",
                                                     "parameters": form.model_json_schema()}}
             for name, form in forms.items()}
    found = {}
    for name in (*forms, "free"):
        lab.say(f"{name}: {len(texts)} questions")
        more = {"tools": [tools[name]], "tool_choice": "required"} if name in forms else {"tools": [*tools.values()]}
        found[name] = own = counted(served, texts, more, options["max_tokens"], forms)
        lab.say(f"{name}: {own['answers']} answers, {own['calls']} calls, {own['valid']} of them fit")
    return found


def counted(served, texts, more, most, forms) -> dict[str, int]:
    """Number of answers, of calls, and of valid calls, whose arguments are JSON that fits the schema; also of
    calls that are the same if the answer arrives letter by letter."""
    from numflow.server.http.ignored import Ignored
    from numflow.server.messages.schemas import ChatRequest
    from numflow.server.protocols.conversation import prepare

    jobs = []
    for seed, text in enumerate(texts):
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": text}], **more})
        prompt = prepare(served, body, True, Ignored())
        settings = {**prompt.wished, **prompt.settings, "max_tokens": most, "temperature": 0.7, "seed": seed}
        request = served.engine.request(prompt.ids, **settings)
        jobs.append((prompt, served.engine.start(request, 1, 0, lambda piece: None)))
    tally = dict.fromkeys(("answers", "calls", "parsed", "valid", "streamed", "cut", "tokens"), 0)
    for prompt, job in jobs:
        job.done.wait()
        if job.error is not None:
            raise job.error
        result, = job.results
        whole, pieces = prompt.make_splitter(), prompt.make_splitter(pieces=True)
        whole.feed(result.text, end=True)
        for letter in result.text:
            pieces.feed(letter)
        pieces.feed("", end=True)
        called = [(call.call.name, call.call.arguments) for call in whole.reply.calls]
        tally["answers"] += 1
        tally["tokens"] += len(result.ids)
        tally["cut"] += result.finish_reason == "length"
        tally["calls"] += len(called)
        tally["parsed"] += sum(_is_json(arguments) for _, arguments in called)
        tally["valid"] += sum(_fits(forms[name], arguments) for name, arguments in called)
        tally["streamed"] += sum(call in called for call in (
            (call.call.name, call.call.arguments) for call in pieces.reply.calls if not call.broken))
    return tally


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _fits(form, arguments: str) -> bool:
    from pydantic import ValidationError

    try:
        form.model_validate_json(arguments, strict=True)
    except ValidationError:
        return False
    return True


def report(lab, found, options) -> None:
    """A table, and a sentence on all forced calls."""
    forced = [own for name, own in found.items() if name != "free"]
    asked, valid = sum(own["answers"] for own in forced), sum(own["valid"] for own in forced)
    lab.text(f"{options['questions']} questions, each with {len(forced)} functions, which must be called; at "
             f"most {options['max_tokens']} tokens, temperature 0.7.")
    lab.claim(f"All {asked} calls are JSON and fit the schema of their function.", valid == asked,
              f"{valid} of {asked} calls are JSON and fit the schema of their function.")
    lab.table(["function", "answers", "calls", "parsed", "valid", "same when streamed", "cut off", "tokens each"],
              [[name, *(own[key] for key in ("answers", "calls", "parsed", "valid", "streamed", "cut")),
                f"{own['tokens'] / own['answers']:.0f}"] for name, own in found.items()])
    free = found["free"]
    lab.text(f"Last row: all functions together, no call is required. The model made {free['calls']} calls in "
             f"{free['answers']} answers; {free['valid']} of them fit.")
