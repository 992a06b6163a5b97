"""`numflow serve`: the HTTP service."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from numflow.cli import options
from numflow.cli.groups import Given, grouped
from numflow.cli.names import of_models
from numflow.cli.running import asked_name, compile_notice
from numflow.distribution import install
from numflow.engine.options import COMMANDS, OPTIONS, LoadOptions, rows
from numflow.errors import DeviceError, RequestError

# Options of every model: those of the commands, but for what `--ray` and `--offline` say, and a few more.
OF_MODELS = [*map(OPTIONS.__getitem__, ("context", "max_batch", "kv_memory", "prefix_disk")),
             *(one for one in rows(LoadOptions, COMMANDS) if one[0].name not in ("imatrix", "transport", "offline"))]
Models = Annotated[list[str] | None, typer.Option("--model", "-m", metavar="[NAME=]MODEL", show_default=False,
                   autocompletion=of_models,
                   help="A model, by the name that requests use; may be repeated. The first is the default and is "
                        "loaded at once, others when first asked for.")]


@grouped
def serve(
    model: Models = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", show_default=False, help="TOML file; "
                                                "the options here override it.")] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", show_default="127.0.0.1",
                                             help="Where to listen; 0.0.0.0 is every address.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", metavar="N", show_default="8080",
                                             help="0: any free port.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(metavar="KEY", show_default=False, help="Ask for this key; may "
                       "be repeated. Better given as NUMFLOW_API_KEY, which other users cannot see.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option("--allow-host", metavar="NAME", show_default=False, help="A "
                          "further name by which clients may call the service; may be repeated.")] = None,
    tool_format: Annotated[str | None, typer.Option("--tool-format", metavar="NAME", show_default="seen from the chat "
                           "template", help="How the models write tool calls, by our name or another engine's: "
                           "tag_json (hermes), bracket_json, plain_json, plain_python (pythonic), ...; docs/server.md "
                           "has all.")] = None,
    overflow: Annotated[str | None, typer.Option("--overflow", metavar="HOW", show_default="refuse", help="Talks that "
                        "the context cannot hold: refuse, drop (the oldest turns), or shift (also where an answer "
                        "fills it).")] = None,
    max_queue: Annotated[int | None, typer.Option(metavar="N", show_default="256", help="Requests that may "
                                                  "wait.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", show_default="all", help="Memory for models; the least "
                                               "recently used make room.")] = None,
    slot_save_path: Annotated[Path | None, typer.Option("--slot-save-path", metavar="DIR", show_default=False,
                              help="Folder of the texts that POST /slots/ID saves and restores.")] = None,
    models: Annotated[Given, OF_MODELS] = Given(),
    ray: Annotated[bool, typer.Option("--ray", help="Place the groups of --devices on the Ray cluster that RAY_ADDRESS "
                                      "names, or on a local one; a worker that dies is replaced.")] = False,
    replicas: Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Copies of the service behind "
                                                 "Ray Serve; one that dies is replaced.")] = None,
    log: Annotated[str | None, typer.Option(metavar="FILE", show_default="standard error",
                                            help="Where the log goes.")] = None,
    traces: Annotated[str | None, typer.Option(metavar="URL", show_default=False, help="Collector of OpenTelemetry "
                      "traces (OTLP over HTTP).")] = None,
    offline: options.Offline = False,
) -> None:
    """Serve models over HTTP, with a chat page.

    Open the printed address in a browser, or point an OpenAI client at ADDRESS/v1, Anthropic's or Ollama's at ADDRESS;
    Inferflow's own interface is there too. docs/server.md has the routes and every option of the configuration file.

    \b
    Examples:
      numflow serve -m MODEL
      numflow serve -m chat=model.gguf -m small=other.gguf --memory 16GB
      NUMFLOW_API_KEY=... numflow serve -m MODEL --host 0.0.0.0 --overflow drop
      numflow serve -c service.toml --prefix-disk 4GB
    """
    try:
        from numflow.server.listen import serve as run
    except ImportError as error:
        raise DeviceError(f"serving needs {error.name}: {install('server')}") from None
    from numflow.server.config.config import make_config, read_config
    from numflow.server.http.logs import start_logging
    from numflow.server.service.guard import LOOPBACK
    from numflow.server.service.service import Service

    if offline:
        os.environ["NUMFLOW_OFFLINE"] = "1"
    keys = api_key or list(filter(None, [os.environ.get("NUMFLOW_API_KEY")])) or None
    service = _given(host=host, port=port, api_keys=keys, max_queue=max_queue, memory=memory, log_file=log,
                     replicas=replicas, allowed_hosts=allow_host, traces=traces,
                     slot_folder=str(slot_save_path) if slot_save_path else None)
    every = _given(tool_format=tool_format, overflow=overflow) | models.values
    if ray:
        every = {"devices": "0", **every, "transport": "ray"}
    tables, source = read_config(config) if config is not None else {}, str(config or "options")
    if model is None and not tables.get("models"):
        make_config(tables, source, service, {"default": {"path": "default"}}, every)  # wrong options before a download
        model = [asked_name(None, offline)]
    made = make_config(tables, source, service, _models(model), every)
    start_logging(made.log_file, made.log_level)

    names = ", ".join(model.name for model in made.models)

    def listens(url: str) -> None:
        print(f"numflow loads {names}, to be served on {url}", flush=True)

    def serves(url: str, plans: dict[str, str]) -> None:
        for name, plan in plans.items():
            print(f"memory of {name}: {plan}", flush=True)
        print(f"numflow serves {names} on {url}", flush=True)
        if made.host not in LOOPBACK and not made.api_keys:
            print(f"warning: whoever reaches {url} may use it; NUMFLOW_API_KEY or --api-key asks for a key",
                  file=sys.stderr, flush=True)

    uses_cpu = any(model.load.get("backend", LoadOptions.backend) == "cpu" for model in made.models)
    with compile_notice(uses_cpu):
        if made.replicas:
            from numflow.server.replicas.front import serve as run_replicas

            run_replicas(made, listens, serves)
        else:
            run(Service(made), listens, serves)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _models(given: list[str] | None) -> dict[str, dict[str, Any]] | None:
    """Models of the command line; None: those of the file."""
    if given is None:
        return None
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = _short(text), text
        if name in found:
            raise RequestError(f"two models go by the name {name!r}: give --model NAME=MODEL")
        found[name] = {"path": path}
    return found


def _short(path: str) -> str:
    """A file's name without its ending, a folder's name; other names as they are."""
    place = Path(path)
    if not place.exists():
        return path
    return place.resolve().name if place.is_dir() else place.stem


