"""`numflow chat`: a conversation, at a terminal or from a pipe."""

import sys
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.conversation import Conversation
from numflow.cli.groups import Execution, SamplingOptions, grouped
from numflow.cli.keyboard import Keyboard
from numflow.cli.running import loaded
from numflow.cli.strategies import completed, streams
from numflow.errors import NumflowError, RequestError

HELP = '/help lists the commands, """ begins a text of several lines, Ctrl-C stops an answer, Ctrl-D leaves'


@grouped
def chat(
    model: options.Model = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = 1024,
    sampling: SamplingOptions = SamplingOptions(),
    draft: options.Draft = None,
    trim: Annotated[bool, typer.Option("--trim", help="Drop the oldest turns when the context is full; else that is "
                                       "said.")] = False,
    how: Execution = Execution(),
    stats: options.Stats = False,
) -> None:
    """Talk with a model.

    The model sees the whole conversation; it must have a chat template. /help lists the commands. Ctrl-C stops an
    answer or clears the line, twice or Ctrl-D leaves. From a pipe each line is a question, and the first that fails
    ends the command with exit code 1.
    """
    from numflow.engine.request.ahead import check_settings, check_writes
    from numflow.engine.request.facts import ModelFacts

    settings = {"max_tokens": max_tokens, **sampling.settings()}
    if not streams(settings):
        raise RequestError("a conversation has one answer at a time: leave out n, best_of and num_beams")
    check_settings(settings, draft is not None)

    def before(built, prompts, _recipe) -> None:
        check_writes(ModelFacts.of(built))
        if not prompts.has_template:
            raise RequestError(f"{built.name} has no chat template; `numflow generate` continues text with it")

    with loaded(model, how, draft=draft, before=before) as (ready, notice):
        completed(ready, settings)  # says what has no effect; the rest is the model's own affair
        keyboard = Keyboard(sys.stdin.isatty())
        _converse(Conversation(ready, notice, system, settings, stats, trim, keyboard.interactive), keyboard)


def _converse(conversation: Conversation, keyboard: Keyboard) -> None:
    """Answer until the input ends, or a command ends it. Errors of a person's input are said; others are raised."""
    if keyboard.interactive:
        print(HELP, file=sys.stderr)
    while (text := keyboard.question()) is not None:
        try:
            if not conversation.take(text):
                return
        except NumflowError as error:
            if not keyboard.interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
