"""`numflow pull`, `numflow rm` and `numflow models`: models by name."""

from pathlib import Path
from typing import Any

from numflow.cli import options
from numflow.cli.running import print_json
from numflow.cli.tables import print_table


def pull(model: options.ModelArgument, offline: options.Offline = False) -> None:
    """Fetch a model and print where it is.

    What is fetched is checked; a model that is there already is left alone.
    """
    from numflow import registry

    print(registry.resolve(model, offline=offline))


def rm(model: options.ModelArgument) -> None:
    """Remove a fetched model from this disk.

    Of a model of the Hugging Face hub every quantisation that is there goes. Files of your own are left alone.
    """
    from numflow import registry
    from numflow.registry.progress import megabytes

    folder, size = registry.remove(model)
    print(f"{folder}: {megabytes(size)} removed")


def models(json: options.Json = False) -> None:
    """List known models, and which are on this disk.

    NAME:SIZE and NAME:QUANTISATION are read too: :4b is a size, :q8_0 a quantisation.
    """
    from numflow import registry
    from numflow.registry.paths import models_dir
    from numflow.registry.progress import megabytes

    rows: list[dict[str, Any]] = [
        {"name": entry.name, "aliases": list(entry.aliases), "task": entry.task, "parameters": entry.parameters or None,
         "bytes": entry.bytes or None, "source": entry.source, "license": entry.license, "about": entry.about,
         "path": path, "bytes_here": _size(path) if path else 0, "default": entry.name == registry.default_model()}
        for entry in registry.known().values() for path in (registry.installed(entry),)]
    if json:
        print_json({"folder": models_dir(), "models": rows})
        return
    print_table(["name", "also", "task", "parameters", ">size", "here", "license", "about"],
                [(row["name"], ", ".join(row["aliases"]), row["task"], row["parameters"] or "",
                  megabytes(row["bytes_here"] or row["bytes"]) if row["bytes_here"] or row["bytes"] else "",
                  "yes" if row["path"] else "no", row["license"],
                  row["about"] + (" (default)" if row["default"] else "")) for row in rows])
    print(f"\n{megabytes(sum(row['bytes_here'] for row in rows))} on this disk. NAME:SIZE and NAME:QUANTISATION are "
          "read as well (:4b, :q8_0); any file, folder or ORG/NAME of the Hugging Face hub works too.")


def _size(path: Path) -> int:
    """Bytes of a model: of its file, or of the files in its folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
