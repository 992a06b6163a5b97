"""`numflow classify` and `numflow rerank`."""

from dataclasses import asdict
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.groups import Execution, grouped
from numflow.cli.inputs import read_lines
from numflow.cli.names import of_models
from numflow.cli.running import loaded, print_json
from numflow.cli.tables import print_table
from numflow.errors import RequestError

ScoringModel = Annotated[str, typer.Option("--model", "-m", show_default=False, metavar="MODEL",
                         autocompletion=of_models,
                         help="A classifier or reranker: a file, a folder, a name, or ORG/NAME.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long; without this option they are "
                                        "an error.")]


def _before(built, prompts, _recipe) -> None:
    from numflow.engine.request.ahead import check_scores
    from numflow.engine.request.facts import ModelFacts

    check_scores(ModelFacts.of(built))
    prompts.check()


@grouped
def classify(
    model: ScoringModel,
    texts: options.Texts = None,
    file: options.LinesFile = None,
    top_k: Annotated[int, typer.Option(metavar="K", help="Number of labels to show for each text.")] = 1,
    truncate: Truncate = False,
    how: Execution = Execution(),
    json: options.Json = False,
) -> None:
    """Classify texts: show the likeliest labels of each."""
    lines = read_lines(texts or [], file)
    if top_k < 1:
        raise RequestError(f"--top-k should be 1 or more, is {top_k}")
    with loaded(model, how, before=_before) as (ready, notice):
        head = ready.score_head
        found = ready.scores(lines, truncate=truncate)
        shares = head.probabilities(found)
        notice.clear()
    best = [(-row).argsort(kind="stable")[:top_k].tolist() for row in shares]
    if json:
        print_json([[{"label": head.labels[i], "probability": float(shares[n, i]), "score": float(found[n, i])}
                     for i in chosen] for n, chosen in enumerate(best)])
        return
    print_table(["label", ">probability", ">score", "text"],
                [(head.labels[i], f"{shares[n, i]:.4f}", f"{found[n, i]:.4f}", line)
                 for n, (line, chosen) in enumerate(zip(lines, best)) for i in chosen])


@grouped
def rerank(
    model: ScoringModel,
    query: Annotated[str, typer.Argument(metavar="QUERY", show_default=False, help="The query.")],
    documents: options.Texts = None,
    file: options.LinesFile = None,
    top_n: Annotated[int | None, typer.Option(metavar="N", show_default="all", help="Number of documents to "
                                              "show.")] = None,
    truncate: Truncate = False,
    how: Execution = Execution(),
    json: options.Json = False,
) -> None:
    """Sort documents by their relevance to a query."""
    lines = read_lines(documents or [], file)
    with loaded(model, how, before=_before) as (ready, notice):
        found = ready.rerank(query, lines, top_n, truncate=truncate)
        notice.clear()
    if json:
        print_json([asdict(document) for document in found])
        return
    print_table([">score", ">place", "document"],
                [(f"{document.score:.4f}", document.index + 1, document.text) for document in found])
