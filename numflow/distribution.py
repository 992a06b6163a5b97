"""Distribution name of numflow. `numflow` on the Python package index is another project."""

NAME = "numflow-llm"  # as in pyproject.toml; the import and the command are numflow


def install(extra: str) -> str:
    """Command that installs an extra: "pip install 'NAME[server]'"."""
    return f"pip install '{NAME}[{extra}]'"
