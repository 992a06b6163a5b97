"""The table of commands. This module imports neither NumPy nor Numba, so that --help is quick."""

import sys
from typing import Annotated

import typer

import numflow
from numflow.cli import (
    bench,
    cache,
    chat,
    client,
    doctor,
    experiment,
    generate,
    inspect,
    learn,
    load,
    measure,
    models,
    plan,
    quantize,
    scores,
    serve,
    spec,
    texts,
)
from numflow.cli.failures import guarded
from numflow.cli.help import Command, Commands

app = typer.Typer(
    cls=Commands,
    help="Run language models that are described by specification files.",
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="`numflow COMMAND --help` shows the options of a command. Set NUMFLOW_DEBUG=1 to see tracebacks.",
)
for command in (generate.generate, chat.chat, texts.embed, texts.fill_mask, texts.translate, scores.classify,
                scores.rerank, models.pull, models.rm, models.models, inspect.inspect, bench.bench, measure.perplexity,
                quantize.quantize, quantize.verify, quantize.imatrix, measure.warmup, plan.plan, experiment.experiment,
                serve.serve, client.client, client.ps, load.bench_serve, doctor.doctor):
    app.command(command.__name__.replace("_", "-"), cls=Command)(guarded(command))
app.add_typer(spec.app, name="spec")
app.add_typer(cache.app, name="cache")
app.add_typer(learn.app, name="learn")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"numflow {numflow.__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_version,
                                                is_eager=True)] = False) -> None:
    for stream in (sys.stdout, sys.stderr):  # "?" instead of an error for a character that the console cannot encode
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
