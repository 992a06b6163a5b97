"""`numflow bench-serve`: load test of a running service."""

import os
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.running import print_json
from numflow.cli.tables import print_fields
from numflow.distribution import install
from numflow.errors import DeviceError, RequestError


def bench_serve(
    url: Annotated[str, typer.Option(metavar="URL", help="Address of the service, on this "
                                     "machine.")] = "http://127.0.0.1:8080",
    clients: Annotated[int, typer.Option("--clients", "-c", metavar="N", help="Number of concurrent requests.")] = 32,
    seconds: Annotated[float, typer.Option(metavar="S", help="Seconds during which new requests are sent.")] = 20.0,
    requests: Annotated[int | None, typer.Option(metavar="N", show_default="no limit",
                                                 help="Largest number of requests.")] = None,
    prompt_words: Annotated[int, typer.Option(metavar="N", help="Number of words of each prompt.")] = 32,
    max_tokens: options.MaxTokens = 64,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="NAME", show_default="the service's first",
                                              help="Name of a model of the service.")] = None,
    limit: Annotated[float, typer.Option(metavar="S", help="Seconds after which the run ends in any case.")] = 120.0,
    json: options.Json = False,
) -> None:
    """Load-test a running service on this machine.

    Measured are throughput, time to the first token, time between tokens, and errors. The API key is read from
    NUMFLOW_API_KEY.
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
