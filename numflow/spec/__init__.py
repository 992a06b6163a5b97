"""Specification files: what a model is, as TOML."""

from numflow.spec.detect import detect
from numflow.spec.reader import Spec, list_specs, load_spec
from numflow.spec.resolve import Resolved

__all__ = ["Resolved", "Spec", "detect", "list_specs", "load_spec"]
