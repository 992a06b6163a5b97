"""`numflow embed`, `numflow fill-mask` and `numflow translate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.groups import Execution, grouped
from numflow.cli.inputs import STDIN, piped_text, read_lines, read_prompt
from numflow.cli.names import of_models
from numflow.cli.running import asked_name, loaded, print_json
from numflow.cli.tables import print_table
from numflow.errors import RequestError

Source = Annotated[str | None, typer.Option("--from", metavar="LANGUAGE", show_default=False, help="Source language.")]
Target = Annotated[str | None, typer.Option("--to", metavar="LANGUAGE", show_default=False, help="Target language.")]


def _shipped(model: str | None, purpose: str) -> str:
    """`model`, or the model that comes with numflow for a purpose. Standard error names a larger one to download."""
    from numflow import registry

    if model:
        return model
    models, shipped = registry.known(), registry.shipped_model(purpose)
    assert shipped is not None  # every purpose of a command here has a shipped model
    entry, larger = models[shipped], models[registry.default_model(purpose)]
    print(f"using {shipped} ({entry.about}), which comes with numflow; one to download: -m {larger.name} "
          f"({larger.about}, {larger.license})", file=sys.stderr, flush=True)
    return shipped


@grouped
def embed(
    texts: options.Texts = None,
    model: options.Model = None,
    file: options.LinesFile = None,
    pooling: Annotated[str | None, typer.Option(metavar="NAME", show_default="the model's own", help="cls, max, mean, "
                                                "mean_sqrt_len, weighted_mean or last.")] = None,
    normalize: Annotated[bool, typer.Option(help="Scale every embedding to length 1.")] = True,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long; without this option they "
                                           "are an error.")] = False,
    prompt: Annotated[str | None, typer.Option(metavar="NAME", show_default="the model's own", help="Name of one of "
                                               "the model's prompts, put in front of every text.")] = None,
    instruction: Annotated[str | None, typer.Option(metavar="TEXT", show_default="the model's own", help="Instruction "
                                                    "in the prompt, for models whose prompt has one.")] = None,
    dimensions: Annotated[int | None, typer.Option(metavar="N", show_default="all", help="Keep the first N values of "
                                                   "each embedding (Matryoshka models).")] = None,
    npy: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the embeddings to a NumPy "
                                             "file, float32 [texts, width], instead of printing them.")] = None,
    how: Execution = Execution(),
    json: options.Json = False,
) -> None:
    """Print embeddings of texts, one per line.

    Pooling, normalisation and prompts are read from the model's files.
    """
    if json and npy is not None:
        raise RequestError("give --json or --npy, not both")
    lines = read_lines(texts or [], file)

    def before(built, prompts, recipe) -> None:
        from numflow.engine.tasks.embedding import poolings

        poolings(built.name, recipe(), pooling)
        prompts.check()

    name = asked_name(model, how.offline, "embed")
    with loaded(name, how, before=before) as (ready, notice):
        vectors = ready.embed(lines, normalize, pooling, truncate=truncate, prompt=prompt,
                              dimensions=dimensions, instruction=instruction)
        notice.clear()
    if npy is not None:
        _save(vectors, npy)
        return
    if json:
        print_json({"model": name, "spec": ready.network.name, "embeddings": vectors.tolist()})
        return
    for vector in vectors:
        print(*(f"{value:.6g}" for value in vector))


def _save(vectors, path: Path) -> None:
    import numpy as np

    try:
        with path.open("wb") as file:
            np.save(file, vectors)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


@grouped
def fill_mask(
    model: Annotated[str | None, typer.Option("--model", "-m", show_default="tiny-encoder", metavar="MODEL",
                                              autocompletion=of_models,
                                              help="A masked language model: a file, a folder, a name, or ORG/NAME.")
                     ] = None,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", show_default=False, help='Text with gaps: "Paris is '
                                               '[MASK]."; without it standard input is read.')] = None,
    top_k: Annotated[int, typer.Option(metavar="K", help="Number of words to show for each gap.")] = 5,
    how: Execution = Execution(),
    json: options.Json = False,
) -> None:
    """Show the likeliest words for the masked gaps of a text."""
    from numflow.engine.request.ahead import check_masked
    from numflow.engine.request.facts import ModelFacts

    text = _only_text(text)

    def before(built, prompts, _recipe) -> None:
        check_masked(ModelFacts.of(built))
        prompts.check()

    with loaded(_shipped(model, "fill-mask"), how, before=before) as (ready, notice):
        gaps = ready.fill_mask(text, top_k)
        notice.clear()
    if json:
        print_json([[filling._asdict() for filling in gap] for gap in gaps])
        return
    print_table([">gap", ">probability", "word", "text"],
                [(number, f"{f.probability:.4f}", f.token, f.text) for number, gap in enumerate(gaps, 1) for f in gap])


def _only_text(text: str | None) -> str:
    """The text of the argument or of standard input."""
    if text is None or text == STDIN:
        return read_prompt(None, None, "numflow fill-mask")
    if piped_text().strip():
        raise RequestError("fill-mask takes one text: give it as an argument or on standard input, not both")
    return text


@grouped
def translate(
    model: Annotated[str | None, typer.Option("--model", "-m", show_default="tiny-translator", metavar="MODEL",
                                              autocompletion=of_models,
                                              help="A translation model: a file, a folder, a name, or ORG/NAME.")
                     ] = None,
    texts: options.Texts = None,
    source: Source = None,
    target: Target = None,
    file: options.LinesFile = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", metavar="N", show_default="the model's own",
                                                   help="Largest number of new tokens of each text.")] = None,
    num_beams: Annotated[int | None, typer.Option(metavar="N", show_default="the model's own",
                                                  help="Width of the beam search; 1: greedy.")] = None,
    how: Execution = Execution(),
    json: options.Json = False,
) -> None:
    """Translate texts, one per line.

    Languages are written as in the model's vocabulary: en, eng_Latn or en_XX, for example.
    """
    from numflow.engine.request.ahead import check_translates
    from numflow.engine.request.facts import ModelFacts

    lines = read_lines(texts or [], file)
    given = {"max_tokens": max_tokens, "num_beams": num_beams}
    settings = {name: value for name, value in given.items() if value is not None}
    def before(built, prompts, _recipe) -> None:
        check_translates(ModelFacts.of(built))
        prompts.check()

    with loaded(_shipped(model, "translate"), how, before=before) as (ready, notice):
        results = ready.translate(lines, source, target, **settings)
        notice.clear()
    if json:
        print_json([{"text": result.text, "ids": result.ids, "finish_reason": result.finish_reason,
                     "stats": result.stats} for result in results])
        return
    for result in results:
        print(result.text)
