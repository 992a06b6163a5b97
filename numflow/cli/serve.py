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

# Options of every served model: the options of the commands without imatrix, transport (set by --ray) and offline,
# and some options of the engine.
OF_MODELS = [*map(OPTIONS.__getitem__, ("context", "max_batch", "kv_memory", "prefix_disk")),
             *(one for one in rows(LoadOptions, COMMANDS) if one[0].name not in ("imatrix", "transport", "offline"))]
Models = Annotated[list[str] | None, typer.Option("--model", "-m", metavar="[NAME=]MODEL", show_default=False,
                   autocompletion=of_models,
                   help="A model to serve, with the name that requests use for it. May be repeated. The first model is "
                        "the default and is loaded at the start; the others are loaded on their first request.")]


@grouped
def serve(
    model: Models = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", show_default=False, help="TOML file "
                                                "with options. Options of the command line override it.")] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", show_default="127.0.0.1", help="Address to listen on; "
                                             "0.0.0.0 is every address of this machine.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", metavar="N", show_default="8080",
                                             help="Port to listen on; 0: any free port.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(metavar="KEY", show_default=False, help="API key that requests "
                       "must have. May be repeated. The environment variable NUMFLOW_API_KEY is safer: other users "
                       "cannot see it.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option("--allow-host", metavar="NAME", show_default=False,
                          help="Another host name that requests may use for the service. May be repeated.")] = None,
    tool_format: Annotated[str | None, typer.Option("--tool-format", metavar="NAME", show_default="detected from the "
                           "chat template", help="Format of the models' tool calls: tag_json (hermes), bracket_json, "
                           "plain_json, plain_python (pythonic), ...; docs/server.md has all.")] = None,
    overflow: Annotated[str | None, typer.Option("--overflow", metavar="HOW", show_default="refuse",
                        help="Conversations longer than the context: refuse (an error), drop (remove the oldest "
                        "turns), or shift (drop, and continue answers that fill the context).")] = None,
    max_queue: Annotated[int | None, typer.Option(metavar="N", show_default="256", help="Requests that may wait; "
                                                  "more get status 429.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", show_default="no limit", help="Memory for all models. "
                                               "The least recently used models are unloaded to stay below it.")] = None,
    slot_save_path: Annotated[Path | None, typer.Option("--slot-save-path", metavar="DIR", show_default=False,
                              help="Folder in which POST /slots/ID saves and restores the KV cache of texts.")] = None,
    models: Annotated[Given, OF_MODELS] = Given(),
    ray: Annotated[bool, typer.Option("--ray", help="Run the groups of --devices on the Ray cluster of RAY_ADDRESS, or "
                                      "on a local one. A worker that dies is replaced.")] = False,
    replicas: Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Number of copies of the "
                                                 "service behind Ray Serve. A copy that dies is replaced.")] = None,
    log: Annotated[str | None, typer.Option(metavar="FILE", show_default="standard error", help="Log file.")] = None,
    traces: Annotated[str | None, typer.Option(metavar="URL", show_default=False, help="Collector of OpenTelemetry "
                      "traces (OTLP over HTTP).")] = None,
    offline: options.Offline = False,
) -> None:
    """Serve models over HTTP, with a chat page.

    Open the printed address in a browser for the chat page. The base URL for OpenAI clients is ADDRESS/v1, for
    Anthropic and Ollama clients ADDRESS. docs/server.md has all routes and every option of the configuration file.

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
        make_config(tables, source, service, {"default": {"path": "default"}}, every)  # checked before a download
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
            print(f"warning: everybody who can reach {url} may use it; set a key with NUMFLOW_API_KEY or --api-key",
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
    """Models of the command line; None: use the models of the configuration file."""
    if given is None:
        return None
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = _short(text), text
        if name in found:
            raise RequestError(f"two models have the name {name!r}: use --model NAME=MODEL")
        found[name] = {"path": path}
    return found


def _short(path: str) -> str:
    """The name of a file without its suffix, or the name of a folder; other names are unchanged."""
    file = Path(path)
    if not file.exists():
        return path
    return file.resolve().name if file.is_dir() else file.stem


