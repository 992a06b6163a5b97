"""`numflow chat`: a conversation."""

import sys
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.generate import stats_line
from numflow.cli.groups import Execution, Sampling, grouped
from numflow.cli.running import loaded
from numflow.cli.strategies import streams
from numflow.errors import NumflowError, RequestError

HELP = "/reset starts anew, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


@grouped
def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", show_default=False, help="System message.")] = None,
    max_tokens: options.MaxTokens = 1024,
    sampling: Sampling = Sampling(),
    draft: options.Draft = None,
    how: Execution = Execution(),
    stats: options.Stats = False,
) -> None:
    """Talk with a model.

    The model sees the whole conversation; it must have a chat template. /reset starts anew, /exit (or Ctrl-D)
    ends, Ctrl-C stops an answer.
    """
    settings = {"max_tokens": max_tokens, **sampling.settings()}
    if not streams(settings):
        raise RequestError("a conversation has one answer at a time: leave out n, best_of and num_beams")
    with loaded(model, how, draft=draft) as (ready, notice):
        if not ready.has_template:
            raise RequestError(f"{ready.network.name} has no chat template; `numflow generate` continues text with it")
        _converse(ready, notice, [{"role": "system", "content": system}] if system else [], settings, stats)


def _converse(model, notice, opening: list[dict], settings: dict, stats: bool) -> None:
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  line editing and history in input()

        print(HELP, file=sys.stderr)
    while (line := _read_line("> " if interactive else "")) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(f"no command {line.split()[0]}: {HELP}", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            _answer(model, notice, messages, settings, stats, interactive)


def _read_line(prompt: str) -> str | None:
    """The next line without spaces around it; None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _answer(model, notice, messages: list[dict], settings: dict, stats: bool, interactive: bool) -> None:
    """Print the answer to the last message and append it. A failure drops that message and is said in one line."""
    try:
        run = model.generate(messages, stream=True, **settings)
        try:
            for piece in run:
                notice.clear()
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            run.close()
            if not interactive:
                raise
        finally:
            print(flush=True)
    except NumflowError as error:
        if not interactive:
            raise
        messages.pop()
        print(f"error: {error}", file=sys.stderr)
        return
    messages.append({"role": "assistant", "content": run.result.text})
    if stats and run.result.finish_reason:
        print(stats_line({**run.result.stats, "load_s": model.load_s}, run.result.finish_reason), file=sys.stderr)
