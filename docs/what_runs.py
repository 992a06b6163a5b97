"""The README's table of what runs (families x formats x features), made from specifications, readers and commands.

`python docs/what_runs.py` writes it into the README; a test compares both.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import typer

from numflow.cli.app import app
from numflow.formats.quantised.method import METHODS
from numflow.spec.reader import Spec, list_specs

# A row of the table: families that are shown by name, and the commands that run it.
_ROWS = {
    "decoders": ("llama qwen3 gemma3 phi3 glm4 olmo2 smollm3", "generate chat serve"),
    "with a mixture of experts": ("deepseek_v2 qwen3_moe gpt_oss llama4 minimax_m2", "generate chat serve"),
    "with recurrent layers": ("qwen3_next mamba2 granitemoehybrid falcon_h1 lfm2", "generate chat serve"),
    "encoders": ("bert modernbert roberta", "embed fill-mask classify rerank serve"),
    "encoder-decoders": ("marian m2m100 t5", "translate serve"),
}
_OWN = ("draft", "json-schema", "grammar", "session", "num-beams", "pooling")  # options that not all commands have
_SHARED = ("adapter", "weights", "activations", "kv", "device", "devices")  # options that all have


def row_of(spec: Spec) -> str:
    """The row that a specification belongs to; "" of what only drafts for other models."""
    if spec.type == "decoder" and spec.section("mixer").get("kind", "compressed") != "compressed":
        return "with recurrent layers"
    if spec.type == "decoder" and spec.section("moe"):
        return "with a mixture of experts"
    return f"{spec.type}s" if spec.type != "draft" else ""


def markdown() -> str:
    """Table and sentences; a family is a specification that checkpoints are recognised by."""
    found: dict[str, dict[str, Spec]] = {row: {} for row in _ROWS}
    for spec in list_specs():
        if row_of(spec) and spec.section("detect"):
            found[row_of(spec)][spec.name] = spec
    lines = ["| networks | families | of these in GGUF | examples | commands | options |", "|---|---|---|---|---|---|"]
    above = ""
    for row, (shown, commands) in _ROWS.items():
        specs = found[row]
        ggufs = sum(bool(spec.section("detect").get("gguf")) for spec in specs.values())
        titles = ", ".join(specs[name].title.partition(" (")[0] for name in shown.split())
        names = ", ".join(f"`{name}`" for name in commands.split())
        own = ", ".join(f"`--{name}`" for name in _OWN if _has(commands, name))
        runs = "the same | the same" if commands == above else f"{names} | {own}"
        lines.append(f"| {row} | {len(specs)} | {ggufs} | {titles} | {runs} |")
        above = commands
    every = [f"`--{name}`" for name in _SHARED if all(_in(command, name) for _, commands in _ROWS.values()
                                                      for command in commands.split() if command != "serve")]
    lines += ["", f"All families run from safetensors and torch pickles, also from weights quantised by "
                  f"{len(METHODS)} methods ({', '.join(METHODS)}).", f"All commands have {', '.join(every)}."]
    return "\n".join(lines) + "\n"


def _has(commands: str, option: str) -> bool:
    return any(_in(command, option) for command in commands.split() if command != "serve")


def _in(command: str, option: str) -> bool:
    return any(f"--{option}" in param.opts for param in _commands()[command].params)


@cache
def _commands() -> dict[str, Any]:
    """The commands by name, with their options."""
    table: Any = typer.main.get_command(app)
    return table.commands


if __name__ == "__main__":
    page = Path(__file__).resolve().parents[1] / "README.md"
    text, found = re.subn(r"^\| networks \|.*?^All commands have [^\n]*\n", lambda _: markdown(),
                          page.read_text(encoding="utf-8"), flags=re.S | re.M)
    if found != 1:
        raise SystemExit(f"{page}: the table of what runs is there {found} times")
    page.write_text(text, encoding="utf-8")
