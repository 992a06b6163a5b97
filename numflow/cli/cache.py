"""`numflow cache`: list and clear numflow's caches on disk."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from numflow.cli import options
from numflow.cli.failures import guarded
from numflow.cli.running import print_json
from numflow.cli.tables import print_table
from numflow.errors import RequestError, did_you_mean

app = typer.Typer(help="Show the caches on this disk, or clear them.", rich_markup_mode=None)

# File names that numflow writes. Other files in the folders are neither counted nor removed: they may be the user's.
_MADE = {"kernels": re.compile(r"\w+-[0-9a-f]{16}|cuda"),
         "prepared": re.compile(r"[0-9a-f]{16}_.+\.safetensors|\..+\.part"),
         "quantised": re.compile(r"[0-9a-f]{16}_.+\.safetensors|\..+\.part"),
         "prefixes": re.compile(r"[0-9a-f]{16}\.session|\..+\.part")}
_ABOUT = {"models": "downloaded", "kernels": "compiled for this machine",
          "prepared": "quantised models in the CPU's memory layout", "quantised": "quantised while loading (--weights)",
          "prefixes": "prefix caches of services (--prefix-disk)"}


@app.callback(invoke_without_command=True)
def show(context: typer.Context, json: options.Json = False) -> None:
    if context.invoked_subcommand is None:
        guarded(_show)(json)


@app.command()
@guarded
def clear(kind: Annotated[str | None, typer.Argument(metavar="[KIND]", show_default=False, help="models, kernels, "
          "prepared, quantised or prefixes. Without it: all but models, which would have to be downloaded "
          "again.")] = None) -> None:
    """Remove cached files. They are created again when they are needed."""
    from numflow.registry.progress import megabytes

    folders = _folders()
    if kind is not None and kind not in folders:
        raise RequestError(f"there is no cache {kind!r}{did_you_mean(kind, folders)}")
    for name in folders if kind is None else (kind,):
        if kind is None and name == "models":
            continue
        entries = list(_made(name, folders[name]))
        size = sum(_size(entry)[0] for entry in entries)
        for entry in entries:
            _remove(entry)
        print(f"{name}: {megabytes(size)} removed from {folders[name]}")


def _show(json: bool) -> None:
    from numflow.registry.progress import megabytes

    rows: list[dict[str, Any]] = []
    for kind, folder in _folders().items():
        sizes = [_size(entry) for entry in _made(kind, folder)]
        rows.append({"kind": kind, "bytes": sum(size for size, _ in sizes), "files": sum(count for _, count in sizes),
                     "folder": folder, "about": _ABOUT[kind]})
    if json:
        print_json(rows)
        return
    print_table(["kind", ">size", ">files", "folder", "about"],
                [(row["kind"], megabytes(row["bytes"]), row["files"], row["folder"], row["about"]) for row in rows])
    print(f"\n{megabytes(sum(row['bytes'] for row in rows))}. `numflow cache clear` removes all but models, `numflow "
          "cache clear KIND` one kind. NUMFLOW_HOME sets another folder for all, NUMFLOW_CACHE for all but models.")
    print("Models of the Hugging Face hub are in the hub's own cache (`hf cache`).")


def _folders() -> dict[str, Path]:
    """The folder of each kind."""
    from numflow import places
    from numflow.registry.paths import models_dir

    return {"models": models_dir(), **{kind: places.cache(kind) for kind in (*places.CACHES, "prefixes")}}


def _made(kind: str, folder: Path) -> Iterator[Path]:
    """Files and folders in a folder that numflow has written."""
    from numflow import registry

    if not folder.is_dir():
        return
    names = registry.known() if kind == "models" else {}
    for entry in sorted(folder.iterdir()):
        name = entry.name
        if kind != "models":
            if _MADE[kind].fullmatch(name):
                yield entry
        elif name in names or (name.startswith(".") and name[1:].rpartition(".")[0] in names):  # .NAME.partial
            yield entry


def _size(entry: Path) -> tuple[int, int]:
    """Bytes and number of files of a file or folder. Another process may remove files at the same time."""
    total = count = 0
    for path in (entry, *entry.rglob("*")) if entry.is_dir() and not entry.is_symlink() else (entry,):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if not path.is_dir() or path.is_symlink():
            total, count = total + found.st_size, count + 1
    return total, count


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
