"""`numflow learn`: the labs of the course."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from numflow.cli import options
from numflow.cli.failures import guarded
from numflow.cli.names import of_models
from numflow.cli.running import print_json
from numflow.cli.tables import print_table, printable

if TYPE_CHECKING:
    from numflow.learn.catalogue import LabFile

STORIES = "tiny"  # the default of check's --model

app = typer.Typer(help="The course: programming labs with automatic checks.",
                  no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="LAB", show_default=False, help="Number or name of a lab, from `list`.")]
Folder = Annotated[Path | None, typer.Option("--dir", metavar="FOLDER", show_default="labs/NN-NAME",
                                             help="Folder of your file.")]
Labs = Annotated[Path | None, typer.Option("--labs", metavar="FOLDER", show_default=False,
                                           help="Folder with your own labs, to use instead of the course's.")]
Limit = Annotated[float, typer.Option("--limit", metavar="SECONDS", min=1.0, help="Time limit for your code.")]


@app.command("list")
@guarded
def list_(json: options.Json = False, labs: Labs = None) -> None:
    """List the labs and your progress."""
    from numflow.learn import catalogue, progress

    rows: list[dict[str, Any]] = [
        {"number": lab.number, "name": lab.name, "title": lab.title, "minutes": lab.facts["minutes"],
         "needs": lab.facts.get("needs", []), **progress.state(lab.name)} for lab in catalogue.labs(labs)]
    if json:
        print_json(rows)
        return
    print_table([">lab", "name", "title", ">minutes", "state"],
                [[row[key] for key in ("number", "name", "title", "minutes", "state")] for row in rows])


@app.command()
@guarded
def start(
    name: Name,
    folder: Folder = None,
    again: Annotated[bool, typer.Option("--again", help="Start the lab again. Your old file is renamed, not "
                                        "deleted.")] = False,
    labs: Labs = None,
) -> None:
    """Start a lab: write the file with the functions to implement."""
    from numflow.learn import catalogue, folders, progress

    lab = catalogue.lab_of(name, labs)
    path = folders.start(lab, folders.folder_of(lab, folder), again)
    if progress.state(lab.name)["state"] == progress.NEW:
        _note(lab, state=progress.STARTED)
    print(f"{printable(path)}: {lab.title}, about {lab.facts['minutes']} minutes")
    print(f"then: numflow learn check {lab.number}{_dir(folder)}")


@app.command()
@guarded
def check(
    name: Name,
    folder: Folder = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", show_default="tiny; with --json none",
                                              autocompletion=of_models,
                                              help="Model that generates text with your code, after the check has "
                                              "passed.")] = None,
    limit: Limit = 60.0,
    json: options.Json = False,
    labs: Labs = None,
) -> None:
    """Check your file: exit code 0 if it is correct, 1 if not.

    For a wrong result the first failing case is shown: where it differs, by how much, and the likely cause if it is a
    known mistake.
    """
    from numflow.learn import catalogue, folders, progress, show
    from numflow.learn.check import check as run

    lab = catalogue.lab_of(name, labs)
    facts = run(lab, folders.folder_of(lab, folder), limit, STORIES if model is None and not json else model)
    before = progress.state(lab.name)
    _note(lab, attempts=before["attempts"] + 1,
          state=progress.PASSED if facts["passed"] or before["state"] == progress.PASSED else progress.STARTED)
    facts["attempts"] = before["attempts"] + 1
    if json:
        print_json(facts)
    else:
        for line in show.verdict_lines(facts):
            print(printable(line, keep="\n\t"))
    if not facts["passed"]:
        raise typer.Exit(1)


@app.command()
@guarded
def bench(name: Name, folder: Folder = None, limit: Limit = 120.0, json: options.Json = False,
          labs: Labs = None) -> None:
    """Measure the speed of your code, compared with numflow's own.

    Without --dir and without a file of yours in the default folder, the solution is measured.
    """
    from numflow.errors import RequestError
    from numflow.learn import catalogue, folders, show
    from numflow.learn.check import bench as run
    from numflow.learn.check import bench_solution

    lab = catalogue.lab_of(name, labs)
    lab_folder = folders.folder_of(lab, folder)
    solved = folder is None and not (lab_folder / lab.file_name).exists()
    facts = bench_solution(lab, limit) if solved else run(lab, lab_folder, limit)
    if not facts["passed"]:
        raise RequestError(facts["message"])
    if json:
        print_json(facts)
        return
    print(f"lab {lab.number}, {lab.title}{', solved' if solved else ''}: {facts['what']}")
    for line in show.bar_lines(facts["bars"], facts["unit"]):
        print(line)
    for line in facts.get("chart", []):
        print(line)


@app.command()
@guarded
def hint(
    name: Name,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", min=1, show_default="the next one",
                                                 help="Number of the hint.")] = None,
    labs: Labs = None,
) -> None:
    """Show the next hint of a lab."""
    from numflow.errors import RequestError
    from numflow.learn import catalogue, progress

    lab = catalogue.lab_of(name, labs)
    hints, seen = lab.facts["hints"], progress.state(lab.name)["hints"]
    wanted = min(seen + 1, len(hints)) if number is None else number
    if not 1 <= wanted <= len(hints):
        raise RequestError(f"lab {lab.number} has hints 1 to {len(hints)}, not {wanted}")
    _note(lab, hints=max(seen, wanted))
    print(f"hint {wanted} of {len(hints)}: {hints[wanted - 1]}")


@app.command()
@guarded
def solution(name: Name, folder: Folder = None, labs: Labs = None) -> None:
    """Write a lab's solution into your folder. Your file is renamed, not deleted."""
    from numflow.learn import catalogue, folders

    lab = catalogue.lab_of(name, labs)
    path, renamed = folders.solve(lab, folders.folder_of(lab, folder))
    print(f"{printable(path)}: the solution" + (f"; your file is now {printable(renamed.name)}" if renamed else ""))


def _note(lab: "LabFile", **changes: Any) -> None:
    """Save the progress of a lab. An error is reported, and the command continues."""
    import sys

    from numflow.learn import progress

    try:
        progress.note(lab.name, **changes)
    except OSError as error:
        print(f"progress cannot be saved: {printable(error)}", file=sys.stderr)


def _dir(folder: Path | None) -> str:
    import shlex

    return "" if folder is None else f" --dir {shlex.quote(str(folder))}"
