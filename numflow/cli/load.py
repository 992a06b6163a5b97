"""`numflow bench serve`: a service under load."""

import os
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.running import print_json
from numflow.cli.tables import print_fields
from numflow.distribution import install
from numflow.errors import DeviceError, RequestError


def bench_serve(
    url: Annotated[str, typer.Option(metavar="URL", help="The service; on this machine.")] = "http://127.0.0.1:8080",
    clients: Annotated[int, typer.Option("--clients", "-c", metavar="N", help="Requests at a time.")] = 32,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long new requests are made.")] = 20.0,
    requests: Annotated[int | None, typer.Option(metavar="N", show_default="as many as fit",
                                                 help="Requests in all.")] = None,
    prompt_words: Annotated[int, typer.Option(metavar="N", help="Words of each prompt.")] = 32,
    max_tokens: options.MaxTokens = 64,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="NAME", show_default="the service's first",
                                              help="The model to ask.")] = None,
    limit: Annotated[float, typer.Option(metavar="S", help="The whole run ends after that.")] = 120.0,
    json: options.Json = False,
) -> None:
    """Measure a running service under load.

    Shown is what many clients see: throughput, times to the first token and between tokens, errors. Only services
    of this machine, for a bounded time. An API key is read from NUMFLOW_API_KEY.
    """
    try:
        from numflow.server.load_generator import LoadTest, run
    except ImportError as error:
        raise DeviceError(f"this needs {error.name}: {install('server')}") from None

    report = run(LoadTest(url, clients, seconds, requests, prompt_words, max_tokens, model,
                          os.environ.get("NUMFLOW_API_KEY"), limit=limit)).report()
    if not report["requests"]:
        raise RequestError(f"{url}: no request was answered: {', '.join(report['errors']) or 'too little time'}")
    if json:
        print_json(report)
        return
    shown = {name: value for name, value in report.items() if not isinstance(value, dict)}
    for name in ("time_to_first_token_s", "inter_token_s", "request_s"):
        shown[name] = ", ".join(f"{key} {value:.4f}" for key, value in report[name].items()) or "none"
    shown["errors"] = ", ".join(f"{count} x {text}" for text, count in report["errors"].items()) or "none"
    print_fields((name, f"{value:.2f}" if isinstance(value, float) else value) for name, value in shown.items())
