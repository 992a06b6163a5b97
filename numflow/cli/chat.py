"""`numflow chat`: a conversation."""

import sys
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.generate import stats_line
from numflow.cli.running import gpu_options, loaded
from numflow.cli.strategies import strategy, streams
from numflow.errors import NumflowError, RequestError

HELP = "/reset starts anew, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", show_default=False, help="System message.")] = None,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    decoding: options.Decoding = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    set_: options.Set = None,
    draft: options.Draft = None,
    speculate: options.Speculate = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    activations: options.Activations = "int8",
    weights: options.Weights = None,
    imatrix: options.Imatrix = None,
    devices: options.Devices = None,
    transport: options.Transport = "threads",
    kv: options.KV = None,
    kv_k: options.KVK = None,
    kv_v: options.KVV = None,
    host_embeddings: options.HostEmbeddings = False,
    host_kv_percent: options.HostKV = 0.0,
    cpu_layers: options.CpuLayers = 0,
    spec: options.SpecFile = None,
    stats: options.Stats = False,
    offline: options.Offline = False,
) -> None:
    """Talk with a model.

    The model sees the whole conversation; it must have a chat template. /reset starts anew, /exit (or Ctrl-D)
    ends, Ctrl-C stops an answer.
    """
    settings = {"max_tokens": max_tokens, **strategy(
        set_, temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, decoding_alg=decoding,
        repetition_penalty=repetition_penalty, speculate=speculate)}
    if not streams(settings):
        raise RequestError("a conversation has one answer at a time: leave out n, best_of and num_beams")
    with loaded(model, device, spec=spec, activations=activations, threads=threads, offline=offline, weights=weights,
                imatrix=imatrix, kv=kv, kv_k=kv_k, kv_v=kv_v, draft=draft, devices=devices,
                transport=transport, **gpu_options(host_embeddings, host_kv_percent, cpu_layers)) as (ready, notice):
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
