"""`numflow pull`, `numflow rm` and `numflow models`: download, remove and list models."""

from pathlib import Path
from typing import Any

from numflow.cli import options
from numflow.cli.running import print_json
from numflow.cli.tables import print_table


def pull(model: options.ModelArgument, offline: options.Offline = False) -> None:
    """Download a model and print its path.

    The download is verified. A model that is already on this disk is not downloaded again.
    """
    from numflow import registry

    print(registry.resolve(model, offline=offline))


def rm(model: options.ModelArgument) -> None:
    """Remove a downloaded model from this disk.

    For a model of the Hugging Face hub all downloaded quantisations are removed. Your own files are never removed.
    """
    from numflow import registry
    from numflow.registry.progress import megabytes

    folder, size = registry.remove(model)
    print(f"{folder}: {megabytes(size)} removed")


def models(json: options.Json = False) -> None:
    """List known models, and whether they are on this disk.

    A name may be followed by a size (NAME:4b) or a quantisation (NAME:q8_0).
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
    print(f"\n{megabytes(sum(row['bytes_here'] for row in rows))} on this disk. A name may be followed by a size (:4b) "
          "or a quantisation (:q8_0). Any file, folder or ORG/NAME of the Hugging Face hub works too.")


def _size(path: Path) -> int:
    """Bytes of a model: of its file, or of the files in its folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
