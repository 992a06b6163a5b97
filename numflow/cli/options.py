"""Options that several commands share. Each option is declared once."""

from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from numflow.cli.names import of_models
from numflow.engine.options import OPTIONS, OptionFacts, in_shell


def of_table(name: str) -> OptionInfo:
    """The command-line option for an option of numflow.load or Engine."""
    row, facts = OPTIONS[name]
    return spelled(facts, name, row.default)


def spelled(facts: OptionFacts, name: str, default: object, given: bool = False) -> OptionInfo:
    """A command-line option. given: the command's own default is None, so the help text has to show `default`."""
    shows_default = given and default is not None and default is not False
    shown = facts.shown_for(in_shell) or (("on" if default is True else str(default)) if shows_default else "")
    flag = in_shell(name) + (f"/--no-{in_shell(name)[2:]}" if default is True else "")
    return typer.Option(flag, metavar=facts.metavar or None, help=facts.help_for(in_shell),
                        show_default=shown or default is not None)


Model = Annotated[str | None, typer.Option("--model", "-m", show_default=False, metavar="MODEL",
                  autocompletion=of_models,
                  help="A file, a folder, a name from `numflow models`, or ORG/NAME on the Hugging Face hub. Without "
                       "this option: the default model of that list.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", show_default=False, autocompletion=of_models,
                          help="A file, a folder, a name from `numflow models`, or ORG/NAME.")]
Devices = Annotated[str | None, of_table("devices")]
Context = Annotated[int | None, of_table("context")]
Draft = Annotated[str | None, of_table("draft")]
Offline = Annotated[bool, of_table("offline")]
SpecFile = Annotated[str | None, of_table("spec")]
Threads = Annotated[int | None, of_table("threads")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Largest number of new tokens.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", show_default="the model's", help="0 takes the "
                        "likeliest token; higher is more random.")]
TopK = Annotated[int | None, typer.Option(metavar="K", show_default="the model's", help="Sample from the K likeliest "
                 "tokens; 0: from all.")]
TopP = Annotated[float | None, typer.Option(metavar="P", show_default="the model's", help="Sample from the likeliest "
                 "tokens whose probabilities sum to P.")]
MinP = Annotated[float | None, typer.Option(metavar="P", show_default="the model's", help="Drop tokens less likely "
                 "than P times the likeliest token.")]
Decoding = Annotated[str | None, typer.Option("--decoding", metavar="NAME", show_default=False,
                     help="Decoding strategy by Inferflow's name, or as JSON: greedy, sample.std, top_k, top_p, min_p, "
                          "tfs, typical, mirostat, fsd or random_fsd.")]
RepetitionPenalty = Annotated[float | None, typer.Option(metavar="X", show_default="the model's", help="Penalty of "
                              "tokens that are already in the text; 1: off.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", show_default=False,
                 help="Stop string: the text ends before it. May be repeated.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", show_default=False,
                help="Any other setting of docs/decoding.md, such as mirostat=2, n=3 or num_beams=4. May be "
                     "repeated.")]
JsonSchema = Annotated[str | None, typer.Option(metavar="JSON", show_default=False,
                       help="Constrain the output to this JSON schema; @FILE reads the schema from a file.")]
Regex = Annotated[str | None, typer.Option(metavar="REGEX", show_default=False,
                  help="Constrain the output to this regular expression; @FILE reads it from a file.")]
Grammar = Annotated[str | None, typer.Option(metavar="GRAMMAR", show_default=False,
                    help="Constrain the output to this grammar (Lark or GBNF); @FILE reads it from a file.")]
Logprobs = Annotated[int | None, typer.Option(metavar="N", show_default=False,
                     help="With --json: log-probabilities of every new token and of the N likeliest alternatives.")]
Speculate = Annotated[str | None, typer.Option(metavar="HOW", show_default=False,
                      help="Source of draft tokens (speculative decoding): ngram (n-grams of the text), draft (the "
                           "draft model) or off.")]
Seed = Annotated[int | None, typer.Option(metavar="N", show_default="random", help="Seed of the sampling.")]
Session = Annotated[Path | None, typer.Option("--session", metavar="FILE", show_default=False, help="Load the KV "
                    "cache of this file, and save it there at the end: a prompt with the same beginning is not "
                    "computed again.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print times and speeds on standard error.")]

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", show_default=False,
                  help="Texts. Lines of -f FILE, or of standard input, are further texts.")]
LinesFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                      help="File with one text per line; - is standard input.")]
ReadFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                     help="File to read the prompt from, or to append to the prompt; - is standard input.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", show_default=False, help="System message.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")]
