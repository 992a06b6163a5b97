"""`numflow client` and `numflow ps`: requests to a running service."""

import os
from typing import Annotated, Any

import typer

from numflow.cli import options
from numflow.cli.inputs import read_prompt
from numflow.cli.running import print_json
from numflow.cli.tables import print_table
from numflow.errors import RequestError

Url = Annotated[str, typer.Option(metavar="URL", envvar="NUMFLOW_URL", help="Address of the service.")]
HERE = "http://127.0.0.1:8080"


def client(
    prompt: Annotated[str | None, typer.Argument(show_default=False, help="The prompt. The text of -f FILE, or of "
                                                 "standard input, is appended to it.")] = None,
    url: Url = HERE,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="NAME", show_default="the service's first",
                                              help="Name of a model of the service.")] = None,
    file: options.ReadFile = None,
    system: options.System = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", metavar="N", show_default="the service's",
                                                   help="Largest number of new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", show_default="the service's", help="0 takes the "
                                                      "likeliest token; higher is more random.")] = None,
    seed: options.Seed = None,
    raw: options.Raw = False,
    models: Annotated[bool, typer.Option("--models", help="List the models of the service and exit.")] = False,
    json: options.Json = False,
) -> None:
    """Send a prompt to a running service (`numflow serve`).

    The answer is printed while it is generated. The API key is read from NUMFLOW_API_KEY.
    """
    from numflow.server.client import ask

    key = os.environ.get("NUMFLOW_API_KEY")
    if models:
        listing, = ask(url, "/v1/models", key=key)
        if json:
            print_json(listing)
            return
        print_table(["model", ">context"], [(entry["id"], entry.get("max_model_len", "not loaded"))
                                            for entry in listing["data"]])
        return
    body = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stream": not json,
            **_prompt_fields(read_prompt(prompt, file, "numflow client"), system, raw)}
    path = "/v1/completions" if raw else "/v1/chat/completions"
    answer = ask(url, path, {name: value for name, value in body.items() if value is not None}, key)
    if json:
        print_json(next(answer))
        return
    _print(answer)


def ps(url: Url = HERE, json: options.Json = False) -> None:
    """Show the models of a running service.

    Each row has a model's state, memory and requests. The API key is read from NUMFLOW_API_KEY.
    """
    from numflow.registry.progress import megabytes
    from numflow.server.client import ask

    status, = ask(url, "/status", key=os.environ.get("NUMFLOW_API_KEY"))
    if json:
        print_json(status)
        return
    print_table(["model", "state", ">memory", ">context", ">running", ">waiting"], [
        (model["id"], model["error"] or ("loaded" if model["loaded"] else "not loaded"),
         megabytes(model["bytes"]) if model.get("bytes") else "", model.get("context") or "",
         *((model.get("engine") or {}).get(key, "") for key in ("running", "waiting"))) for model in status["models"]])


def _prompt_fields(text: str, system: str | None, raw: bool) -> dict[str, Any]:
    """The fields of a request's body that hold the prompt."""
    if raw:
        if system is not None:
            raise RequestError("--system has no effect with --raw")
        return {"prompt": text}
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*messages, {"role": "user", "content": text}]}


def _print(answer) -> None:
    try:
        for event in answer:
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                print(choice.get("text") or delta.get("reasoning_content") or delta.get("content") or "", end="",
                      flush=True)
    finally:
        print(flush=True)
