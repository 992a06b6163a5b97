"""`numflow doctor`: facts on this machine and installation, for bug reports."""

import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

from numflow.cli import options
from numflow.cli.options import in_shell
from numflow.cli.running import print_json
from numflow.cli.tables import print_fields
from numflow.distribution import NAME, install

PACKAGES = ("numba", "llvmlite", "numpy", "safetensors", "gguf", "tokenizers", "sentencepiece", "jinja2",
            "huggingface_hub", "filelock", "typer", "rich", "markdown-it-py", "prompt_toolkit")
EXTRAS = {"server": ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"),
          "cuda": ("numba-cuda", "cuda-core", "cuda-bindings", "greenlet"), "nccl": ("nccl4py", "nvidia-nccl-cu13"),
          "ray": ("ray",),
          "cuda-compile": ("nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink"),
          "report": ("matplotlib",), "learn": ("greenlet", "matplotlib"), "structured": ("llguidance",),
          "site": ("mkdocs",), "traces": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
          "test": ("bochscpu-python", "pytest", "pytest-xdist", "hypothesis", "ruff", "matplotlib", "llguidance",
                   "starlette", "uvicorn", "pydantic", "prometheus_client", "httpx", "openai", "greenlet", "unicorn",
                   "pyte", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
          "test-clients": ("anthropic", "ollama"),
          "test-frameworks": ("instructor", "langchain-ollama", "langchain-openai"),
          "test-web": ("schemathesis", "selenium"), "types": ("mypy",)}


def doctor(json: options.Json = False) -> None:
    """Show facts on this machine, for bug reports.

    Versions, CPU, GPU, caches, free memory and disk, and optional packages.
    """
    facts = {**_python(), **_processor(), **_gpu(), **_caches(), **_space(), **_extras()}
    if json:
        print_json(facts)
        return
    print_fields(facts.items())


def _python() -> dict[str, object]:
    import numflow

    versions = {name: _version(name) or f"missing: install {NAME} again" for name in PACKAGES}
    return {"numflow": f"{numflow.__version__} in {Path(numflow.__file__).parent}",
            "python": f"{platform.python_version()} in {sys.executable}", "system": platform.platform(), **versions}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> dict[str, object]:
    from numflow.cpu.runtime.cores import default_threads
    from numflow.cpu.simd.isa import isa
    from numflow.engine.measure.host import host

    facts = host()
    return {"processor": facts["cpu"], "cores": facts["cores"], "threads": default_threads(), "instructions": isa()}


def _gpu() -> dict[str, object]:
    """The GPUs that `--device cuda` can use, or the reason why there are none."""
    from numflow.cuda.compiler.compat import gpu_names
    from numflow.errors import DeviceError

    try:
        return {"gpu": ", ".join(gpu_names())}
    except DeviceError as error:
        return {"gpu": f"none: {error.spelled(in_shell)}"}


def _caches() -> dict[str, object]:
    from numflow.kernel_cache import root
    from numflow.registry.paths import is_offline, models_dir

    return {"models": _folder(models_dir()), "kernels": _folder(root()), "prepared weights": _folder(root("prepared")),
            "quantised while loading": _folder(root("quantised")), "offline": "yes" if is_offline() else "no"}


def _folder(path: Path) -> str:
    from numflow.registry.progress import megabytes

    if not path.exists():
        return f"{path} (not made yet)"
    files = [file for file in path.rglob("*") if file.is_file()]
    writable = "" if os.access(path, os.W_OK) else ", cannot be written"
    return f"{path} ({megabytes(sum(file.stat().st_size for file in files))} in {len(files)} files{writable})"


def _space() -> dict[str, object]:
    from numflow.registry.paths import models_dir
    from numflow.registry.progress import megabytes

    folder = next(parent for parent in (models_dir(), *models_dir().parents) if parent.exists())
    return {"free memory": _free_memory(), "free disk": f"{megabytes(shutil.disk_usage(folder).free)} at {folder}"}


def _free_memory() -> str:
    from numflow.registry.progress import megabytes

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return "unknown on this system"
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return f"{megabytes(sizes['MemAvailable'])} of {megabytes(sizes['MemTotal'])}"


def _extras() -> dict[str, object]:
    state: dict[str, object] = {}
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if _version(package) is None]
        state[f"extra {extra}"] = f"not installed: {', '.join(missing)} ({install(extra)})" \
            if missing else "installed"
    return state
