"""Findings: a fault ends a kernel, as a GPU would end it; a note tells of what a GPU may let pass and must not."""

from collections import Counter
from dataclasses import dataclass, field

from .counters import Counters


class Fault(Exception):
    """A kernel did what no kernel survives."""


@dataclass
class Checks:
    """What to look for, and what was found: notes by their text, and how often.

    races:       threads that touch one place of shared or global memory in no order, one of them writing.
    unwritten:   memory and registers that are read before anybody wrote them.
    approximate: results of approximating instructions get the error that NVIDIA documents.
    steps:       basic blocks of a run, after which a kernel is taken to go on for ever.
    counters:    of each kernel, where they are wanted (`counted`).
    """

    races: bool = True
    unwritten: bool = True
    approximate: bool = True
    counted: bool = False
    steps: int = 2_000_000
    notes: Counter = field(default_factory=Counter)
    counters: dict[str, Counters] = field(default_factory=dict)

    def note(self, kernel: str, what: str) -> None:
        """Count a finding."""
        self.notes[f"{kernel}: {what}"] += 1
