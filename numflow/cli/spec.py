"""`numflow spec`: model specification files."""

from pathlib import Path
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.failures import guarded
from numflow.cli.inspect import print_network
from numflow.cli.running import print_json
from numflow.cli.tables import print_table, printable
from numflow.errors import RequestError, SpecError

app = typer.Typer(help="List, show, check and draft model specification files.", no_args_is_help=True,
                  rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="SPEC", show_default=False, help="A file, or a name from `list`.")]


@app.command("list")
@guarded
def list_(json: options.Json = False) -> None:
    """List the specifications that come with numflow."""
    from numflow import spec

    rows = [{"name": s.name, "type": s.type, "extends": [p.stem for p in s.chain[1:] if not p.stem.startswith("_")],
             "title": s.title} for s in spec.list_specs()]
    if json:
        print_json(rows)
        return
    print_table(["name", "type", "extends", "title"],
                [(row["name"], row["type"], ", ".join(row["extends"]), row["title"]) for row in rows])


@app.command()
@guarded
def show(name: Name) -> None:
    """Print a specification and the specifications that it extends."""
    from numflow.spec import load_spec

    for index, path in enumerate(load_spec(name).chain):
        print(f"{'' if index == 0 else chr(10)}# {printable(path)}")
        print(printable(path.read_text(encoding="utf-8").rstrip(), keep="\n\t"))


@app.command()
@guarded
def check(
    name: Name,
    checkpoint: Annotated[str | None, typer.Argument(metavar="CHECKPOINT", show_default=False,
                          help="A model to check the specification against.")] = None,
    offline: options.Offline = False,
) -> None:
    """Check a specification, alone or against a model.

    With CHECKPOINT the specification is resolved and the model's network is printed. If SPEC is itself a model, the
    model's own specification is checked.
    """
    from numflow import formats, network, registry
    from numflow.network.new_spec_keys import check_confirmed
    from numflow.spec import load_spec

    if enclosed := checkpoint is None and _is_model(Path(name)):
        checkpoint = name
    opened = formats.open_checkpoint(registry.resolve(checkpoint, offline=offline)) if checkpoint is not None else None
    found = load_spec(name) if opened is None else network.choose_spec(opened, None if enclosed else name)
    check_confirmed(found)
    if opened is not None:
        print_network(network.build(found, opened), opened, full=False)
        print()
    subject = f"the specification in {name}" if found.enclosed else found.path
    print(printable(f"{subject} is right" + (f" and fits {checkpoint}" if checkpoint else "")))


def _is_model(path: Path) -> bool:
    """Whether a path is a model on this disk, which may contain a specification."""
    return path.is_dir() or (path.is_file() and path.suffix.lower() in (".safetensors", ".gguf"))


@app.command()
@guarded
def new(
    checkpoint: options.ModelArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", show_default=False,
                      help="Write to this file instead of standard output. An existing file is not "
                           "overwritten.")] = None,
    offline: options.Offline = False,
) -> None:
    """Draft a specification for a model.

    If the draft cannot run yet, the command fails with the reason.
    """
    from numflow import formats, registry
    from numflow.network.drafts.new_spec import draft

    if output is not None and output.exists():
        raise RequestError(f"{output} exists already and is not overwritten")
    drafted = draft(formats.open_checkpoint(registry.resolve(checkpoint, offline=offline)))
    if output is None:
        print(printable(drafted.text.rstrip(), keep="\n\t"), flush=True)
    else:
        try:
            with open(output, "x", encoding="utf-8") as file:
                file.write(drafted.text)
        except OSError as error:
            raise RequestError(f"{output}: {error.strerror}") from None
        print(f"wrote {output}", flush=True)
    if drafted.problem:
        raise SpecError(f"the draft does not run yet: {drafted.problem}")
