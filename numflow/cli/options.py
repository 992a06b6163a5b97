"""Options that several commands share, each spelled once."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Option("--model", "-m", show_default=False, metavar="MODEL",
                  help="A file, a folder, a name that `numflow models` lists, or ORG/NAME of the Hugging Face hub. "
                       "Without it: the default of that list.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", show_default=False,
                          help="A file, a folder, a name that `numflow models` lists, or ORG/NAME.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="What runs it: cpu (compiled), cuda (an NVIDIA "
                   "GPU), reference (NumPy, slow).")]
Activations = Annotated[str, typer.Option(metavar="TYPE", help="int8 (fast), int16 (much closer) or f32 (exact float32 "
                                                               "arithmetic).")]
Weights = Annotated[str | None, typer.Option("--weights", metavar="NAME", show_default="as stored",
                    help="Quantise while loading: a scheme (q2, q3, q3h, q4, q5, q6, q8), a preset (q4-mix) or a "
                         "recipe file.")]
Imatrix = Annotated[str | None, typer.Option("--imatrix", metavar="FILE", show_default=False,
                    help="With --weights: what `numflow imatrix` has measured.")]
KV = Annotated[str | None, typer.Option("--kv", metavar="TYPE", show_default="f16, or f32 with float32 arithmetic",
               help="How keys and values are cached: f32, f16, q8, q6, q5, q4, q3h, q3 or q2.")]
KVK = Annotated[str | None, typer.Option("--kv-k", metavar="TYPE", show_default="--kv",
                help="The same for keys alone.")]
KVV = Annotated[str | None, typer.Option("--kv-v", metavar="TYPE", show_default="--kv",
                help="The same for values alone.")]
HostEmbeddings = Annotated[bool, typer.Option("--host-embeddings", help="On a GPU: keep the table of tokens in the "
                           "host's memory.")]
HostKV = Annotated[float, typer.Option("--host-kv-percent", metavar="N", help="On a GPU: share of the layers whose "
                   "cached keys and values are in the host's memory.")]
CpuLayers = Annotated[int, typer.Option("--cpu-layers", metavar="N", help="With --device cuda: run so many layers on "
                      "the processor, the first ones; -N: the last N.")]
Threads = Annotated[int | None, typer.Option(show_default="one per core", metavar="N", help="CPU threads.")]
Devices = Annotated[str | None, typer.Option("--devices", metavar="TEXT", show_default="one device",
                    help="Place the model on several devices: 0;1 by layer, 0&1 by tensor, 0&1;2&3 both; 0*2;1 gives "
                         "device 0 twice as much. On the CPU a device is a set of threads; with --device cuda numbers "
                         "are GPUs, and cpu may stand beside them: cpu;0.")]
Transport = Annotated[str, typer.Option("--transport", metavar="NAME", help="With --devices: threads; on the CPU "
                      "also processes with shared memory between; or ray (an actor of a Ray cluster for each group).")]
Collectives = Annotated[str | None, typer.Option("--collectives", metavar="NAME", show_default="auto", help="How GPUs "
                        "of a group sum: copies from GPU to GPU, nccl, or auto: nccl where it is installed and each "
                        "device has a card of its own.")]
SpecFile = Annotated[str | None, typer.Option("--spec", metavar="FILE", show_default="detected",
                     help="Specification: a file, or a name that `numflow spec list` shows.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network (also NUMFLOW_OFFLINE=1).")]
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
Draft = Annotated[str | None, typer.Option("--draft", metavar="MODEL", show_default=False,
                  help="A smaller model of the same vocabulary that guesses tokens ahead (speculative decoding).")]
Speculate = Annotated[str | None, typer.Option(metavar="HOW", show_default=False,
                      help="How tokens are guessed ahead: ngram (from the text itself), draft or off.")]
Seed = Annotated[int | None, typer.Option(metavar="N", show_default="random", help="Makes sampling repeatable.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print times and speeds on standard error.")]

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", show_default=False,
                  help="Texts; the lines of -f, or of a file or pipe at standard input, follow them.")]
LinesFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                      help="One text per line; - is standard input.")]
ReadFile = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", show_default=False,
                     help="A file whose text is the prompt, or goes below it; - is standard input.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", show_default=False, help="A system message.")]
