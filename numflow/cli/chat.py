"""`numflow chat`: a conversation, at a terminal or from a pipe."""

import os
import sys
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from numflow import places
from numflow.cli import options
from numflow.cli.groups import Execution, SamplingOptions, grouped
from numflow.cli.keyboard import Keyboard
from numflow.cli.running import CompileNotice, asked_name, loaded
from numflow.cli.sessions import CommandSession
from numflow.cli.strategies import completed, streams
from numflow.errors import NumflowError, RequestError

HELP = ('/help lists the commands, Alt-Enter or """ starts a text of several lines, Ctrl-C stops an answer, Ctrl-D '
        "exits")
HISTORY = "chat_history"


@grouped
def chat(
    model: options.Model = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = 1024,
    sampling: SamplingOptions = SamplingOptions(),
    draft: options.Draft = None,
    trim: Annotated[bool, typer.Option("--trim", help="Drop the oldest turns when the context is full; without this "
                                       "option a full context is an error.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print answers as raw text, and read lines without the line "
                                        "editor.")] = False,
    context: options.Context = None,
    session_: options.Session = None,
    how: Execution = Execution(),
    stats: options.Stats = False,
) -> None:
    """Chat with a model.

    The model sees the whole conversation and must have a chat template. /help lists the commands of the
    conversation. Ctrl-C stops an answer or clears the line; pressed twice, or Ctrl-D, it exits. From a pipe each line
    is a question, and the first error ends the command with exit code 1.
    """
    from numflow.engine.request.ahead import check_settings

    settings = {"max_tokens": max_tokens, **sampling.settings()}
    if not streams(settings):
        raise RequestError("a conversation has one answer at a time: leave out n, best_of and num_beams")
    check_settings(settings, draft is not None)
    with ChatModel(how, draft, settings, context) as models:
        models.open(model)
        typed = sys.stdin.isatty()
        conversation, keyboard = _made(models, system, settings, stats, trim, typed, typed and not plain and _draws())
        if session_ is None:
            _converse(conversation, keyboard)
            return
        saved = CommandSession(models.sessions, session_, stats)
        conversation.resume(saved.note, session_)
        try:
            _converse(conversation, keyboard)
        finally:
            saved.sessions = models.sessions  # /model may have loaded another model
            if conversation.answered:
                saved.save(conversation.note())


class ChatModel:
    """The model of a conversation. Another model replaces it once it has been loaded."""

    model: Any
    notice: CompileNotice
    name: str
    sessions: Any

    def __init__(self, how: Execution, draft: str | None, settings: dict[str, Any], context: int | None):
        self._how, self._settings, self._open = how, settings, ExitStack()
        self._more: dict[str, Any] = {"draft": draft, "context": context}

    def open(self, name: str | None) -> None:
        """Load a model (the default model for None), then close the previous one.

        Raises:
            NumflowError: the model cannot be loaded, or has no chat template; the previous model stays.
        """
        from numflow.engine.sessions.sessions import OpenSessions

        with ExitStack() as stack:
            ready, notice = stack.enter_context(loaded(name, self._how, **self._more, before=_check))
            notice.clear()
            completed(ready, self._settings)  # warns of settings without effect; its result is not needed here
            sessions = stack.enter_context(OpenSessions(ready))  # keeps the KV cache: only new turns are computed
            self._open.close()
            self._open = stack.pop_all()
        self.model, self.notice, self.name, self.sessions = ready, notice, asked_name(name), sessions

    def __enter__(self) -> "ChatModel":
        return self

    def __exit__(self, *error) -> None:
        self._open.__exit__(*error)


def _check(built, prompts, _recipe) -> None:
    from numflow.engine.request.ahead import check_writes
    from numflow.engine.request.facts import ModelFacts

    check_writes(ModelFacts.of(built))
    if not prompts.has_template:
        raise RequestError(f"{built.name} has no chat template; `numflow generate` continues text with it")


def _draws() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    named = sys.platform == "win32" or os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return named and sys.stdout.isatty()


def _made(models: ChatModel, system: str | None, settings: dict[str, Any], stats: bool, trim: bool, typed: bool,
          draws: bool) -> tuple[Any, Keyboard]:
    """A Conversation and the Keyboard that reads its questions."""
    from numflow.cli.answers import DrawnAnswer, PlainAnswer
    from numflow.cli.conversation import COMMANDS, Conversation

    editor = None
    if draws:
        from numflow.cli.editor import Editor

        editor = Editor({word: about for word, (_, about) in COMMANDS.items()}, places.home() / HISTORY)
    conversation = Conversation(models, system, settings, stats, trim, typed, DrawnAnswer if draws else PlainAnswer)
    return conversation, Keyboard(typed, editor.line if editor else None)


def _converse(conversation: Any, keyboard: Keyboard) -> None:
    """Answer questions until the input ends or a command exits. At a terminal errors are printed, else raised."""
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
