"""A conversation with a model: its turns, the commands that change them, and dropping turns when the context is full.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numflow import places
from numflow.cli.generate import stats_line
from numflow.cli.strategies import strategy, streams
from numflow.cli.tables import print_fields, printable
from numflow.cli.transcript import attachment, read_conversation, turns_of, write_conversation
from numflow.errors import RequestError, did_you_mean
from numflow.registry.progress import megabytes
from numflow.server.messages.reply import THINKING, Splitter, opens_thinking, shown_marks, special_marks

# command -> (argument, help). Command NAME is the method _NAME of Conversation.
COMMANDS = {
    "help": ("", "this list"),
    "system": ("[TEXT]", 'show or change the system message; "" removes it'),
    "set": ("[NAME=VALUE]", "show or change a setting, such as temperature=0.7; NAME= restores the default"),
    "regen": ("", "answer the last question again"),
    "undo": ("", "remove the last question and its answer"),
    "attach": ("[FILE]", 'attach a text file to the next question, or list the attached files; "" removes them'),
    "think": ("", "show the thinking of the last answer"),
    "trim": ("", "drop the oldest turns, to make room in a full context"),
    "save": ("FILE", "save the conversation to a JSON file"),
    "load": ("FILE", "load a conversation from a JSON file and continue it"),
    "model": ("[NAME]", "show facts about the model, or switch to another model"),
    "stats": ("", "show times of the last answer, and how full the context is"),
    "reset": ("", "start a new conversation, with the same system message"),
    "exit": ("", "exit; also /bye, /quit and Ctrl-D"),
}
ALIASES = {"bye": "exit", "quit": "exit", "?": "help"}


class Conversation:
    """A conversation: its turns (question and answer), and the settings of the next answer.

    models: the ChatModel: the model, its name, and loading of another model.
    trims: drop the oldest turns whenever the context is full.
    shown: creates the display of an answer (PlainAnswer or DrawnAnswer). interactive: Ctrl-C stops an answer, not the
    program.
    """

    def __init__(self, models, system: str | None, settings: dict[str, Any], stats: bool, trims: bool,
                 interactive: bool, shown: Callable[[], Any]):
        self._models, self._shown = models, shown
        self._settings, self._shows_stats, self._trims, self._interactive = settings, stats, trims, interactive
        self._system_text, self._turns = system, list[tuple[str, str]]()
        self._files: list[tuple[str, str]] = []  # name and text of the files attached to the next question
        self._waiting: str | None = None  # a question that did not fit into the context
        self._last: str | None = None
        self._thoughts = ""

    def take(self, text: str) -> bool:
        """Answer a question or run a command. Return False at the end of the conversation.

        Raises:
            NumflowError: the question or command fails; the turns are as before.
        """
        found = re.match(r"/([a-z]+|\?)(?=\s|$)\s*", text)
        if not found or "\n" in text:
            if text:
                self._ask("\n\n".join([text, *(file for _, file in self._files)]))
            return True
        word, rest = ALIASES.get(found[1], found[1]), text[found.end():]
        if word not in COMMANDS:
            raise RequestError(f"no command /{word}{did_you_mean(word, COMMANDS)} (/help explains them)")
        if word == "exit":
            return False
        if rest and not COMMANDS[word][0]:
            raise RequestError(f"/{word} takes no argument, got {rest!r:.60}")
        getattr(self, f"_{word}")(*([rest] if COMMANDS[word][0] else []))
        return True

    def _messages(self, *more: str) -> list[dict[str, str]]:
        """Messages for the chat template. more: a question without an answer yet."""
        texts = [("system", self._system_text)] if self._system_text else []
        texts += [pair for question, answer in self._turns for pair in (("user", question), ("assistant", answer))]
        return [{"role": role, "content": text} for role, text in [*texts, *(("user", text) for text in more)]]

    def resume(self, note: Any, path: Path) -> None:
        """Continue the conversation in a session's note, if there is one. A given system message replaces the saved
        one.

        Raises:
            RequestError: the note is no conversation.
        """
        if note is not None:
            system, self._turns = turns_of(note, path)
            self._system_text = self._system_text or system
            print(f"({self._count()})", file=sys.stderr)

    def _count(self) -> str:
        return f"{len(self._turns)} turn{'' if len(self._turns) == 1 else 's'}"

    @property
    def answered(self) -> bool:
        """Whether the model has answered a question."""
        return self._last is not None

    def note(self) -> dict[str, Any]:
        """The conversation as the note of a session."""
        return {"messages": self._messages()}

    def _ids(self, *more: str) -> list[int]:
        """Tokens of the messages in the model's chat template."""
        return self._models.model.prompts.conversation(self._messages(*more))

    def _ask(self, question: str) -> None:
        """Print the answer to a question, and append both to the turns."""
        self._waiting, ids = None, self._ids(question)
        context = self._models.model.context
        if len(ids) > context:
            if not self._trims:
                self._waiting = question
                raise RequestError(f"the conversation has {len(ids)} tokens, the model's context holds {context}: "
                                   "/trim drops the oldest turns (--trim drops them automatically), /reset starts a "
                                   "new conversation")
            ids = self._make_room(question)
        self._files = []
        text, reason = self._answer(ids)
        if text or reason is not None:
            self._turns.append((question, text))
        else:
            print("(stopped before the first word: the question is removed)", file=sys.stderr)

    def _answer(self, ids: list[int]) -> tuple[str, str | None]:
        """The answer without its thinking, and the finish reason; None: the answer was interrupted."""
        tokenizer = self._models.model.tokenizer
        thinks = shown_marks(tokenizer.chat_template) or THINKING[0]
        marks = special_marks(tokenizer, thinks)
        splitter = Splitter(inside=opens_thinking(tokenizer, ids, thinks), marks=thinks)
        run, reason, shown = self._models.model.generate(ids, stream=True, **self._settings), None, None
        try:
            for piece in run:
                self._models.notice.clear()
                shown = shown or self._shown()
                shown.take(piece, splitter.feed(("" if piece.id is None else marks.get(piece.id, "")) + piece))
            reason = run.result.finish_reason
        except KeyboardInterrupt:
            run.close()
            if not self._interactive:
                raise
        finally:
            shown = shown or self._shown()
            shown.take("", splitter.feed("", end=True))
            shown.end()
        self._thoughts = splitter.reply.reasoning.strip()
        if reason is not None:
            self._remember(run.result, reason)
        return splitter.reply.content, reason

    def _remember(self, result, reason: str) -> None:
        """Keep the times of an answer, and report a full context."""
        self._last = stats_line({**result.stats, "load_s": self._models.model.load_s}, reason)
        if self._shows_stats:
            print(self._last, file=sys.stderr)
        context = self._models.model.context
        full = result.stats["prompt_tokens"] + result.stats["new_tokens"] >= context
        if reason == "length" and full and not self._trims:
            print(f"(the context of {context} tokens is full: /trim drops the oldest turns, /reset starts a new "
                  "conversation)", file=sys.stderr)

    def _make_room(self, *question: str) -> list[int]:
        """Drop the oldest turns until max_tokens or half of the context is free. Return the remaining tokens."""
        context = self._models.model.context
        most = context - min(self._settings.get("max_tokens") or context, context // 2)
        turns, ids = self._turns, self._ids(*question)
        while self._turns and len(ids) > most:
            self._turns = self._turns[1:]
            ids = self._ids(*question) if self._turns or question else []
        if len(ids) > context:
            self._turns = turns
            raise RequestError(f"the question alone has {len(ids)} tokens, the model's context holds {context}: "
                               "shorten it")
        print(f"(the oldest {len(turns) - len(self._turns)} of {len(turns)} turns are dropped)", file=sys.stderr)
        return ids

    def _trim(self) -> None:
        waiting = self._waiting
        if not self._turns and waiting is None:
            raise RequestError("there is nothing to drop")
        self._make_room(*([] if waiting is None else [waiting]))
        if waiting is not None:
            self._ask(waiting)

    def _help(self) -> None:
        print_fields((f"/{word} {argument}".rstrip(), about) for word, (argument, about) in COMMANDS.items())

    def _system(self, text: str) -> None:
        if text:
            self._system_text = None if text == '""' else text
        else:
            print(self._system_text or "(no system message)")

    def _set(self, pair: str) -> None:
        from numflow.engine.request.settings import Settings

        if not pair:
            print_fields(self._settings.items())
            return
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        remaining = {key: old for key, old in self._settings.items() if key != name}
        settings = remaining if equals and not value.strip() else remaining | strategy([pair])
        Settings.of(settings)
        if not streams(settings):
            raise RequestError(f"a conversation has one answer at a time: {name} stays as it is")
        self._settings = settings

    def _regen(self) -> None:
        if not self._turns:
            raise RequestError("there is no answer yet")
        turns = self._turns
        try:
            self._turns = turns[:-1]
            self._ask(turns[-1][0])
        finally:
            if self._turns == turns[:-1]:  # without a new answer the old one stays
                self._turns = turns

    def _undo(self) -> None:
        if not self._turns:
            raise RequestError("there is nothing to undo")
        question, _ = self._turns.pop()
        print(f"(removed: {' '.join(question.split())[:60]})", file=sys.stderr)

    def _save(self, file: str) -> None:
        path = _path("save", file)
        write_conversation(path, self._messages())
        print(f"({self._count()} in {path})", file=sys.stderr)

    def _load(self, file: str) -> None:
        self._system_text, self._turns = read_conversation(_path("load", file))
        self._waiting = None
        print(f"({self._count()})", file=sys.stderr)

    def _attach(self, file: str) -> None:
        if file == '""':
            self._files = []
        elif file:
            path = _path("attach", file)
            self._files.append((str(path), attachment(path)))
        for name, text in self._files:
            print(f"({printable(name)}: {len(text)} characters attached to the next question)", file=sys.stderr)
        if not self._files:
            print("(no file is attached to the next question)", file=sys.stderr)

    def _think(self) -> None:
        print(printable(self._thoughts, keep="\n\t") or "(no thinking)")

    def _model(self, name: str) -> None:
        if name:
            self._models.open(name)
        model = self._models.model
        print_fields([("model", self._models.name), ("spec", model.network.name), ("context", model.context),
                      ("weights", megabytes(model.program.weights_bytes)),
                      ("bits per weight", f"{model.bits_per_weight:.2f}"), ("loaded in", f"{model.load_s:.2f} s")])

    def _stats(self) -> None:
        print(self._last or "(no answer yet)")
        print(f"conversation: {len(self._ids()) if self._turns else 0} of {self._models.model.context} tokens, "
              f"{self._count()}")

    def _reset(self) -> None:
        self._turns, self._waiting = [], None


def _path(word: str, file: str) -> Path:
    if not file:
        raise RequestError(f"/{word} needs the name of a file")
    return places.expanded(file)
