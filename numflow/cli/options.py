"""Options that several commands share, each spelled once."""

from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from numflow.cli.names import of_models
from numflow.engine.options import OPTIONS, OptionFacts, in_shell


def of_table(name: str) -> OptionInfo:
    """The shell's form of an option of numflow.load or Engine."""
    row, found = OPTIONS[name]
    return spelled(found, name, row.default)


def spelled(found: OptionFacts, name: str, default: object, given: bool = False) -> OptionInfo:
    """An option as the shell shows it. given: the command's own default is None, so its help tells `default`."""
    told = given and default is not None and default is not False
    shown = found.shown_for(in_shell) or (("on" if default is True else str(default)) if told else "")
    flag = in_shell(name) + (f"/--no-{in_shell(name)[2:]}" if default is True else "")
    return typer.Option(flag, metavar=found.metavar or None, help=found.help_for(in_shell),
                        show_default=shown or default is not None)


Model = Annotated[str | None, typer.Option("--model", "-m", show_default=False, metavar="MODEL",
                  autocompletion=of_models,
                  help="A file, a folder, a name that `numflow models` lists, or ORG/NAME of the Hugging Face hub. "
                       "Without it: the default of that list.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", show_default=False, autocompletion=of_models,
                          help="A file, a folder, a name that `numflow models` lists, or ORG/NAME.")]
Devices = Annotated[str | None, of_table("devices")]
Context = Annotated[int | None, of_table("context")]
Draft = Annotated[str | None, of_table("draft")]
Offline = Annotated[bool, of_table("offline")]
SpecFile = Annotated[str | None, of_table("spec")]
Threads = Annotated[int | None, of_table("threads")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="New tokens at most.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", show_default="the model's", help="0 takes the "
                        "likeliest token; higher is more random.")]
TopK = Annotated[int | None, typer.Option(metavar="K", show_default="the model's", help="Choose among the K likeliest "
                 "tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(metavar="P", show_default="the model's", help="Choose among the likeliest "
                 "tokens that hold P of all.")]
MinP = Annotated[float | None, typer.Option(metavar="P", show_default="the model's", help="Drop tokens less likely "
                 "than P times the likeliest.")]
Decoding = Annotated[str | None, typer.Option("--decoding", metavar="NAME", show_default=False,
                     help="A strategy by Inferflow's name or JSON: greedy, sample.std, top_k, top_p, min_p, tfs, "
                          "typical, mirostat, fsd or random_fsd.")]
RepetitionPenalty = Annotated[float | None, typer.Option(metavar="X", show_default="the model's", help="Divide the "
                              "scores of tokens that have been by X; 1: off.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", show_default=False,
                 help="End before this text; may be repeated.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", show_default=False,
                help="Any other setting (docs/decoding.md has them), such as mirostat=2, n=3 or num_beams=4; may be "
                     "repeated.")]
JsonSchema = Annotated[str | None, typer.Option(metavar="JSON", show_default=False,
                       help="The text follows this JSON schema; @FILE reads it.")]
Regex = Annotated[str | None, typer.Option(metavar="REGEX", show_default=False,
                  help="The text follows this regular expression; @FILE reads it.")]
Grammar = Annotated[str | None, typer.Option(metavar="GRAMMAR", show_default=False,
                    help="The text follows this grammar (Lark or GBNF); @FILE reads it.")]
Logprobs = Annotated[int | None, typer.Option(metavar="N", show_default=False,
                     help="With --json: log-probabilities of each token and of the N likeliest.")]
Speculate = Annotated[str | None, typer.Option(metavar="HOW", show_default=False,
                      help="How tokens are guessed ahead: ngram (from the text itself), draft or off.")]
Seed = Annotated[int | None, typer.Option(metavar="N", show_default="random", help="Makes sampling repeatable.")]
Session = Annotated[Path | None, typer.Option("--session", metavar="FILE", show_default=False, help="Keep what the "
                    "model has read and written in this file: a text that begins like it goes on from there.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print times and speeds on standard error.")]

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", show_default=False,
                  help="Texts; the lines of -f, or of a file or pipe at standard input, follow them.")]
LinesFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                      help="One text per line; - is standard input.")]
ReadFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                     help="A file whose text is the prompt, or goes below it; - is standard input.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", show_default=False, help="A system message.")]
