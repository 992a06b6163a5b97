"""The name under which numflow is installed. `numflow` on the Python package index is somebody else's package."""

NAME = "numflow-llm"  # as in pyproject.toml; the import and the command are numflow


def install(extra: str) -> str:
    """The command that adds an optional part: "pip install 'NAME[server]'"."""
    return f"pip install '{NAME}[{extra}]'"
