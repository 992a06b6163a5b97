"""The harness for experiments: it runs an experiment and writes its report."""

from numflow.lab.harness import list_experiments, run_experiment
from numflow.lab.redraw import redraw_experiment
from numflow.lab.report import Lab

__all__ = ["Lab", "list_experiments", "redraw_experiment", "run_experiment"]
