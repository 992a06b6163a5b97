"""Names of models that a shell completes (`numflow --install-completion`)."""

from numflow.errors import NumflowError


def of_models(incomplete: str) -> list[tuple[str, str]]:
    """Names that `numflow models` lists and that begin so, with what they are.

    None where a path is being written, or where the user's list cannot be read, as every command then says: the shell
    goes on with files.
    """
    from numflow import registry

    try:
        entries = registry.known().values()
    except NumflowError:
        return []
    return sorted((name, entry.about) for entry in entries for name in (entry.name, *entry.aliases)
                  if name.startswith(incomplete))
