"""`numflow experiment`: run an experiment and write its report."""

from pathlib import Path
from typing import Annotated

import typer

from numflow.cli.tables import print_table
from numflow.errors import RequestError


def experiment(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False,
                                               help="Name of the experiment. Without it all are listed.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", show_default=False,
                                                   help="An option of the experiment; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use toy sizes, as a test that the experiment runs.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", show_default="reports/NAME",
                                             help="Folder of the report.")] = None,
    dirty: Annotated[bool, typer.Option("--dirty", help="Publish from a working tree with uncommitted changes; the "
                                        "report mentions them.")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Redraw the figures of the published report from its "
                                         "results, without measuring.")] = False,
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
            raise RequestError("--redraw measures nothing: leave out --quick, --dirty and --set")
        print(lab.redraw_experiment(name, out))
        return
    print(lab.run_experiment(name, quick, out, {key: value for key, _, value in pairs}, dirty))
