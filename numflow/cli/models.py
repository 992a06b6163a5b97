"""`numflow pull` and `numflow models`: models by name."""

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


def models(json: options.Json = False) -> None:
    """List known models, and which are on this disk."""
    from numflow import registry
    from numflow.registry.paths import models_dir
    from numflow.registry.progress import megabytes

    rows: list[dict[str, Any]] = [
            {"name": entry.name, "aliases": list(entry.aliases), "bytes": entry.bytes or None, "source": entry.source,
             "license": entry.license, "about": entry.about, "path": registry.installed(entry),
             "default": entry.name == registry.default_model()} for entry in registry.known().values()]
    if json:
        print_json({"folder": models_dir(), "models": rows})
        return
    print_table(["name", ">size", "here", "license", "about"],
                [(row["name"], megabytes(row["bytes"]) if row["bytes"] else "", "yes" if row["path"] else "no",
                  row["license"], row["about"] + (" (default)" if row["default"] else "")) for row in rows])
    here = sum(row["bytes"] or 0 for row in rows if row["path"])
    print(f"\n{megabytes(here)} in {models_dir()}. Any file, folder or ORG/NAME of the Hugging Face hub works too.")
