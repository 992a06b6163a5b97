"""Options that several commands share, each spelled once."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Option("--model", "-m", show_default=False, metavar="MODEL",
                  help="A file, a folder, a name that `numflow models` lists, or ORG/NAME of the Hugging Face hub. "
                       "Without it: the default of that list.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", show_default=False,
                          help="A file, a folder, a name that `numflow models` lists, or ORG/NAME.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="What runs it: cpu (compiled), reference (NumPy, slow).")]
Activations = Annotated[str, typer.Option(metavar="TYPE", help="int8 (fast) or f32 (exact float32 arithmetic).")]
Weights = Annotated[str | None, typer.Option("--weights", metavar="NAME", show_default="as stored",
                    help="Quantise while loading: a scheme (q2, q3, q3h, q4, q5, q6, q8), a preset (q4-mix) or a "
                         "recipe file.")]
Imatrix = Annotated[str | None, typer.Option("--imatrix", metavar="FILE", show_default=False,
                    help="With --weights: what `numflow imatrix` has measured.")]
Threads = Annotated[int | None, typer.Option(show_default="one per core", metavar="N", help="CPU threads.")]
SpecFile = Annotated[str | None, typer.Option("--spec", metavar="FILE", show_default="detected",
                     help="Specification: a file, or a name that `numflow spec list` shows.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network (also NUMFLOW_OFFLINE=1).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token; higher is more random.")]
TopK = Annotated[int, typer.Option(metavar="K", help="Choose among the K likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option(metavar="P", help="Choose among the likeliest tokens that hold P of all.")]
MinP = Annotated[float, typer.Option(metavar="P", help="Drop tokens less likely than P times the likeliest.")]
Seed = Annotated[int | None, typer.Option(metavar="N", show_default="random", help="Makes sampling repeatable.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print times and speeds on standard error.")]

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", show_default=False,
                  help="Texts; without them the lines of -f or of standard input.")]
LinesFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                      help="One text per line; - is standard input.")]
ReadFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                     help="Read the prompt from a file; - is standard input.")]
