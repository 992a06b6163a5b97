"""`numflow experiment`: the laboratory."""

from pathlib import Path
from typing import Annotated

import typer

from numflow.cli.tables import print_table
from numflow.errors import RequestError


def experiment(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False,
                                               help="Which one; without it they are listed.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", show_default=False,
                                                   help="An option of the experiment; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", show_default="reports/NAME",
                                             help="Where the report is written.")] = None,
    dirty: Annotated[bool, typer.Option("--dirty", help="Publish although the code has changes that are in no "
                                        "commit; the report says so.")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the figures of the published report anew from its "
                                         "results; nothing is measured.")] = False,
) -> None:
    """Run an experiment and write its report."""
    from numflow import lab

    if name is None:
        print_table(["name", "what it measures"], lab.list_experiments().items())
        return
    pairs = [pair.partition("=") for pair in set_ or []]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise RequestError(f"--set needs KEY=VALUE, got {key!r}")
    if redraw:
        if quick or dirty or pairs:
            raise RequestError("--redraw measures nothing: it goes with --out alone")
        print(lab.redraw_experiment(name, out))
        return
    print(lab.run_experiment(name, quick, out, {key: value for key, _, value in pairs}, dirty))
