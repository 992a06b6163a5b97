"""Completion of model names in the shell (`numflow --install-completion`)."""

from numflow.errors import NumflowError


def of_models(incomplete: str) -> list[tuple[str, str]]:
    """(name, description) of the models of `numflow models` whose name begins with `incomplete`.

    The list is empty where a path is being typed, so that the shell completes files. It is also empty where the user's
    list of models cannot be read; every command reports that error.
    """
    from numflow import registry

    try:
        entries = registry.known().values()
    except NumflowError:
        return []
    return sorted((name, entry.about) for entry in entries for name in (entry.name, *entry.aliases)
                  if name.startswith(incomplete))
