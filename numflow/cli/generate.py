"""`numflow generate`: continue or answer a prompt."""

import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.groups import Execution, Sampling, grouped
from numflow.cli.inputs import read_text
from numflow.cli.running import loaded, print_json
from numflow.cli.strategies import streams
from numflow.cli.tables import print_table
from numflow.errors import RequestError


@grouped
def generate(
    prompt: Annotated[str | None, typer.Argument(show_default=False, help="The prompt; without it (and without -f) "
                                                 "standard input is read.")] = None,
    model: options.Model = None,
    file: options.ReadFile = None,
    max_tokens: options.MaxTokens = 256,
    sampling: Sampling = Sampling(),
    stop_: options.Stop = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    logprobs: options.Logprobs = None,
    draft: options.Draft = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without template.")] = False,
    how: Execution = Execution(),
    stats: options.Stats = False,
    json: options.Json = False,
    trace: Annotated[bool, typer.Option("--trace", help="Instead of text, show the walk of one token: every step with "
                                        "its shapes, kernel and time.")] = False,
) -> None:
    """Generate text from a prompt.

    A model that has a chat template gets the prompt as one user message and answers it; --raw continues the text
    as it stands. Models without a template always continue.
    """
    text = _prompt(prompt, file)
    settings = sampling.settings(stop=stop_, json_schema=json_schema, regex=regex, grammar=grammar, logprobs=logprobs)
    with loaded(model, how, draft=draft) as (ready, notice):
        if trace:
            ready.trace(text)  # what happens once, such as reading weights from disk, is not of interest
            rows = ready.trace(text)
            notice.clear()
            _print_trace(rows, json)
            return
        run = ready.generate(text, max_tokens, stream=streams(settings), chat=not raw and ready.has_template,
                             **settings)
        result = run.result if streams(settings) else run
        _show(run if streams(settings) else _texts(result), notice, quiet=json)
        if json:
            print_json({"model": ready.network.name, **_facts(result, ready.load_s)})
        if stats:
            print(stats_line({**result.stats, "load_s": ready.load_s}, result.finish_reason)
                  + _guesses(result.stats), file=sys.stderr)


def _prompt(prompt, file) -> str:
    if prompt is not None and file is not None:
        raise RequestError("give the prompt as an argument or with --file, not both")
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and file is None and sys.stdin.isatty():
        raise RequestError('no prompt: numflow generate "..." (or -f FILE, or standard input)')
    return read_text(file or "-").removesuffix("\n")


def _texts(result) -> list[str]:
    """All texts of a request for several, each under its number."""
    if len(result.choices) == 1:
        return [result.text]
    return ["\n\n".join(f"[{number}]\n{one.text}" for number, one in enumerate(result.choices, 1))]


def _facts(result, load_s: float) -> dict:
    """A generation as JSON; several texts are under "choices"."""
    facts = {"text": result.text, "ids": result.ids, "finish_reason": result.finish_reason,
             "stats": {**result.stats, "load_s": load_s}}
    facts |= {} if result.score is None else {"score": result.score}
    if result.logprobs is not None:
        facts["logprobs"] = [{"id": one.id, "logprob": one.logprob, "top": [
            {"id": id, "logprob": logprob} for id, logprob in one.top]} for one in result.logprobs]
    if len(result.choices) > 1:
        facts["choices"] = [_facts(replace(one, choices=[]), load_s) for one in result.choices]
    return facts


def _guesses(stats: dict) -> str:
    """How speculation did, if there was any."""
    if "drafts" not in stats:
        return ""
    return f", {stats['accepted_drafts']} of {stats['drafts']} guesses right ({stats['acceptance_rate']:.0%})"


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
