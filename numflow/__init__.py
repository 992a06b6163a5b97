"""numflow runs language models that are described by specification files.

    model = numflow.load("model.gguf")
    print(model.generate("The capital of France is", max_tokens=8).text)

No heavy package is imported before a model is loaded.
"""

from importlib import import_module

from numflow.errors import (
    DeviceError,
    DeviceFaultError,
    DeviceLostError,
    DeviceMemoryError,
    DownloadError,
    FormatError,
    ModelNotFoundError,
    NetworkError,
    NotFiniteError,
    NumflowError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    SpecError,
    TokenizerError,
    UnreachableError,
    UnsafePickleError,
)

# Imports here have to be fast: Ctrl-C before the command handles it would end in a traceback.
TYPE_CHECKING = False  # known to type checkers; importing typing would take time
if TYPE_CHECKING:
    from typing import Any

    from numflow.engine.aio import AsyncEngine
    from numflow.engine.engine import Engine
    from numflow.engine.load import load
    from numflow.engine.model import Model
    from numflow.engine.request.budget import Budget
    from numflow.engine.run.generation import Generation

__version__ = "0.2.0"

__all__ = [
    "load", "Model", "Generation", "Engine", "AsyncEngine", "Budget", "NumflowError", "SpecError", "FormatError",
    "UnsafePickleError", "NetworkError", "TokenizerError", "ModelNotFoundError", "DownloadError",
    "UnreachableError", "RequestError", "NotFiniteError", "QueueFullError", "DeviceError", "DeviceFaultError",
    "DeviceLostError", "DeviceMemoryError", "OutOfMemoryError", "__version__",
]

_LAZY = {"load": "numflow.engine.load", "Model": "numflow.engine.model", "Generation": "numflow.engine.run.generation",
         "Engine": "numflow.engine.engine", "AsyncEngine": "numflow.engine.aio",
         "Budget": "numflow.engine.request.budget"}


def __getattr__(name: str) -> "Any":
    if name not in _LAZY:
        raise AttributeError(f"module 'numflow' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
