"""Fixtures: `run` calls a command as the shell does; `loader` replaces numflow.load."""

import io
import sys
from dataclasses import dataclass

import pytest
import typer

import numflow
from numflow import registry
from numflow.cli.app import app
from numflow.engine.model import Model
from numflow.engine.tasks.embedding_recipe import EmbeddingRecipe
from tests.engine.fake import BOS, EOS, FakeProgram, FakeTokenizer, network, writes

COMMANDS = typer.main.get_command(app)  # a call of `app` would make them all anew


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run("spec", "list", stdin="...") -> Outcome. The home is an empty folder."""
    monkeypatch.setenv("NUMFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NUMFLOW_DEBUG", raising=False)

    def call(*arguments, stdin: str | bytes | None = None) -> Outcome:
        content = stdin.encode() if isinstance(stdin, str) else stdin or b""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        capsys.readouterr()
        try:
            COMMANDS([str(argument) for argument in arguments], prog_name="numflow")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return Outcome(code, *capsys.readouterr())

    return call


class RecordingTokenizer(FakeTokenizer):
    """A byte-level tokenizer with a chat template; records the prompts that it renders."""

    chat_template = "a template"

    def __init__(self):
        self.prompts: list[str] = []

    def token_bytes(self, id):
        return bytes([id])

    def decode(self, ids, skip_special=True):
        return "".join(self.token_text(id) for id in ids)

    def token_text(self, id):
        return {BOS: "<s>", EOS: "</s>"}.get(id) or chr(id)

    def encode(self, text, parse_special=True):
        self.prompts.append(text)
        return super().encode(text, parse_special)


class Loader:
    """Replaces numflow.load: a model that answers every prompt with `answer` (bytes or ids)."""

    def __init__(self):
        self.answer: list[int] | bytes = "Hello, wörld 🙂".encode()
        self.context, self.tokenizer, self.options, self.programs = 512, RecordingTokenizer(), [], []

    def __call__(self, name, before=None, **options):
        self.options.append({"name": name, **options})
        self.programs.append(FakeProgram(self._next))
        model = Model(network(self.context), self.programs[-1], lambda: self.tokenizer, ends=frozenset({EOS}), bos=BOS)
        if before is not None:
            before(model.network, model.prompts, EmbeddingRecipe)
        return model

    def _next(self, history):
        return writes(self.answer, prompt=1 + len(self.tokenizer.prompts[-1].encode()))(history)


@pytest.fixture
def loader(monkeypatch) -> Loader:
    loader = Loader()
    monkeypatch.setattr(numflow, "load", loader)
    monkeypatch.setattr(registry, "reachable", lambda purpose="generate", offline=False: (
        registry.default_model(purpose), ""))
    return loader
