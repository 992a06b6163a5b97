"""`numflow generate`: continue or answer a prompt."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.running import loaded, print_json, read_text
from numflow.cli.tables import print_table
from numflow.errors import RequestError


def generate(
    prompt: Annotated[str | None, typer.Argument(show_default=False, help="The prompt; without it (and without -f) "
                                                 "standard input is read.")] = None,
    model: options.Model = None,
    file: options.ReadFile = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without template.")] = False,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    activations: options.Activations = "int8",
    weights: options.Weights = None,
    imatrix: options.Imatrix = None,
    spec: options.SpecFile = None,
    stats: options.Stats = False,
    json: options.Json = False,
    trace: Annotated[bool, typer.Option("--trace", help="Instead of text, show the walk of one token: every step with "
                                        "its shapes, kernel and time.")] = False,
    offline: options.Offline = False,
) -> None:
    """Generate text from a prompt.

    A model that has a chat template gets the prompt as one user message and answers it; --raw continues the text
    as it stands. Models without a template always continue.
    """
    text = _prompt(prompt, file)
    with loaded(model, device, spec=spec, activations=activations, threads=threads, offline=offline, weights=weights,
                imatrix=imatrix) as (ready, notice):
        if trace:
            ready.trace(text)  # what happens once, such as reading weights from disk, is not of interest
            rows = ready.trace(text)
            notice.clear()
            _print_trace(rows, json)
            return
        run = ready.generate(text, max_tokens, temperature, stream=True, seed=seed, top_k=top_k, top_p=top_p,
                             min_p=min_p, chat=not raw and ready.has_template)
        _show(run, notice, quiet=json)
        if json:
            result = run.result
            print_json({"model": ready.network.name, "text": result.text, "ids": result.ids,
                        "finish_reason": result.finish_reason, "stats": {**result.stats, "load_s": ready.load_s}})
        if stats:
            print(stats_line({**run.result.stats, "load_s": ready.load_s}, run.result.finish_reason), file=sys.stderr)


def _prompt(prompt, file) -> str:
    if prompt is not None and file is not None:
        raise RequestError("give the prompt as an argument or with --file, not both")
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and file is None and sys.stdin.isatty():
        raise RequestError('no prompt: numflow generate "..." (or -f FILE, or standard input)')
    return read_text(file or "-").removesuffix("\n")


def _show(run, notice, quiet: bool) -> None:
    """Print pieces as they come, and a line end after the last, also of an interrupted text."""
    try:
        for piece in run:
            notice.clear()
            if piece and not quiet:
                print(piece, end="", flush=True)
    finally:
        if not quiet:
            print(flush=True)


def stats_line(stats: dict, finish_reason: str) -> str:
    """Times of a generation in one line."""
    return (f"prompt {stats['prompt_tokens']} tokens in {stats['prefill_s']:.3f} s ({stats['prefill_tok_s']:.1f} tok/s)"
            f", {stats['new_tokens']} new in {stats['decode_s']:.3f} s ({stats['decode_tok_s']:.1f} tok/s), "
            f"loaded in {stats['load_s']:.2f} s, ended by {finish_reason}")


def _print_trace(rows, json: bool) -> None:
    if json:
        print_json([asdict(row) for row in rows])
        return
    total = sum(row.microseconds for row in rows)
    print_table(["#", "label", "op", "shapes", "kernel", ">µs"],
                [(row.index, row.label, row.op, row.shapes, row.kernel, f"{row.microseconds:.1f}") for row in rows])
    print(f"{len(rows)} steps, {total / 1000:.3f} ms")
