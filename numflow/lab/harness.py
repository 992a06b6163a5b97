"""Find an experiment, run it, and write its report to reports/NAME/."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from numflow.errors import ModelNotFoundError, RequestError, did_you_mean
from numflow.lab.plotting import pyplot
from numflow.lab.recipe import commit
from numflow.lab.report import Lab

_PACKAGE = "numflow_experiments"


def experiments_dir() -> Path:
    """The folder of experiments: $NUMFLOW_EXPERIMENTS, ./experiments, or the source tree's.

    Raises:
        ModelNotFoundError: there is none (an installed package contains no experiments).
    """
    candidates = [Path(os.environ["NUMFLOW_EXPERIMENTS"])] if "NUMFLOW_EXPERIMENTS" in os.environ else [
        Path("experiments"), Path(__file__).resolve().parents[2] / "experiments"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise ModelNotFoundError(f"no folder of experiments (looked at {', '.join(map(str, candidates))}); run this in the "
                             f"source tree")


def list_experiments() -> dict[str, str]:
    """Name -> first line of the experiment's docstring."""
    found = {}
    for path in sorted(experiments_dir().glob("*/run.py")):
        first = path.read_text(encoding="utf-8").lstrip().removeprefix('"""').splitlines()
        found[path.parent.name] = first[0].rstrip('"') if first else ""
    return found


def run_experiment(name: str, quick: bool = False, out: Path | None = None,
                   options: Mapping[str, str] | None = None, dirty: bool = False) -> Path:
    """Run experiments/NAME/run.py and write report.md, results.json and figures; return their folder.

    quick:   use toy sizes, as a test that the experiment runs.
    out:     folder of the report; default: reports/NAME beside the experiments.
    options: values for the experiment's OPTIONS, as text.
    dirty:   publish from a tree with uncommitted changes of the code; the report mentions them.

    Raises:
        ModelNotFoundError: there is no such experiment.
        RequestError: the experiment has no such option, the tree has uncommitted changes, or results are implausible.
        DeviceError: matplotlib is not installed.
    """
    known, module = list_experiments(), load(name)
    settings = dict(getattr(module, "OPTIONS", {}))
    for key, value in (options or {}).items():
        if key not in settings:
            raise RequestError(f"experiment {name!r} has no option {key!r}{did_you_mean(key, settings)}")
        settings[key] = _as(type(settings[key]), key, value)
    pyplot()  # raises if matplotlib is missing, before hours of measurements
    folder = Path(out) if out is not None else experiments_dir().parent / "reports" / name
    made_with = commit() or ""
    if out is None and not quick and not dirty and made_with.endswith("+"):
        raise RequestError(f"the code differs from commit {made_with.rstrip('+')}, so this report could not be "
                           "reproduced: commit first, use another folder with --out, or add --dirty")
    lab = Lab(name, known[name], quick, folder, settings, options, dirty)
    os.environ.setdefault("NUMFLOW_PREPARED", "0")  # experiments load each model once: no prepared copies
    module.run(lab)
    lab.write()
    return folder


def load(name: str) -> ModuleType:
    """Import the module of an experiment.

    Raises:
        ModelNotFoundError: there is no such experiment.
    """
    experiments = list_experiments()
    if name not in experiments:
        raise ModelNotFoundError(f"no experiment {name!r}{did_you_mean(name, experiments)}")
    return _load(experiments_dir() / name / "run.py")


def _as(kind: type, key: str, value: str) -> Any:
    try:
        return value.lower() in ("1", "true", "yes") if kind is bool else kind(value)
    except ValueError:
        raise RequestError(f"option {key}: expected {kind.__name__}, found {value!r}") from None


def _load(path: Path) -> ModuleType:
    """Import the experiment's run.py as a package, so that it can import its neighbours (`from .speed import table`).

    The folder of experiments is the parent package, with modules that several experiments share.
    """
    folder, name = [str(path.parents[1])], f"{_PACKAGE}.{path.parent.name.replace('-', '_')}"
    package = sys.modules.get(_PACKAGE)
    stale = name if package is not None and package.__path__ == folder else _PACKAGE  # or modules of another folder
    for old in [module for module in sys.modules if f"{module}.".startswith(f"{stale}.")]:
        del sys.modules[old]
    if stale == _PACKAGE:
        sys.modules[_PACKAGE] = package = ModuleType(_PACKAGE)
        package.__path__ = folder
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
