"""`numflow perplexity` and `numflow warmup`."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from numflow.cli import options
from numflow.cli.groups import Execution, grouped
from numflow.cli.inputs import read_text
from numflow.cli.running import loaded, print_json
from numflow.cli.tables import print_fields


@grouped
def perplexity(
    text: Annotated[str, typer.Option("--text", metavar="FILE", show_default=False, help="The text; - is standard "
                                      "input.")],
    model: options.Model = None,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens per chunk.")] = 512,
    chunks: Annotated[int | None, typer.Option(metavar="N", show_default="all", help="Number of chunks.")] = None,
    protocol: Annotated[str, typer.Option(metavar="NAME", help="Tokens that are scored. plain: all tokens of a chunk "
                                          "but the first; half: the second half of a chunk.")] = "plain",
    kl_against: Annotated[str | None, typer.Option("--kl-against", metavar="BASE", show_default=False, help="Also "
                          "measure the KL divergence from this model, which runs in float32.")] = None,
    how: Execution = Execution(),
    json: options.Json = False,
) -> None:
    """Measure the perplexity of a model on a text.

    The text is cut into chunks that do not overlap. With --kl-against the base model runs too, with its weights as
    stored and in float32 arithmetic. Add --activations f32 to measure the loss by quantised weights alone.
    """
    from numflow.engine.measure.divergence import divergence
    from numflow.engine.measure.perplexity import perplexity as run

    content = read_text(text)
    with ExitStack() as stack:
        ready, notice = stack.enter_context(loaded(model, how))

        def progress(done: int, total: int, value: float) -> None:
            notice.clear()
            print(f"chunk {done} of {total}: {value:.4f}", file=sys.stderr, flush=True)

        if kl_against is None:
            result = run(ready, content, context, chunks, progress, protocol)
        else:
            exact = Execution(how.threads, how.backend, "f32", spec=how.spec, offline=how.offline)
            base, _ = stack.enter_context(loaded(kl_against, exact))
            result = divergence(ready, base, content, context, chunks, progress, protocol)
            result["base"] = str(kl_against)
    result |= {"bits_per_weight": ready.bits_per_weight, "weights": how.weights or "as stored",
               "activations": ready.program.activations,
               "kv_k": how.kv_k or how.kv or "auto", "kv_v": how.kv_v or how.kv or "auto"}
    if json:
        print_json(result)
        return
    print_fields((key, f"{value:.4f}" if isinstance(value, float) else value) for key, value in _flat(result))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested tables, with keys "outer.inner"."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@grouped
def warmup(
    model: options.Model = None,
    how: Execution = Execution(),
) -> None:
    """Compile the kernels of a model in advance.

    The next start of the model is quick then. Compiled kernels are cached on this machine. They are compiled again
    after an upgrade of numflow or Numba.
    """
    from numflow.engine.warmup import warm_up

    begin = time.perf_counter()
    with loaded(model, how) as (ready, notice):
        warm_up(ready)
    done = f"{notice.compiled} kernels compiled" if notice.compiled else "all kernels were compiled before"
    print(f"{ready.network.name}: {done}, {time.perf_counter() - begin:.1f} s in all")
