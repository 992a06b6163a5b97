"""Findings. A fault ends a kernel, as on a GPU; a note reports an error that a GPU may let pass."""

from collections import Counter
from dataclasses import dataclass, field

from .counters import Counters
from .timeline import USUAL, Latencies


class Fault(Exception):
    """An error that ends the kernel."""


@dataclass
class Checks:
    """The checks to make, and the findings.

    races:       report data races on shared and global memory.
    unwritten:   report reads of uninitialised memory and registers.
    approximate: give approximate instructions the error that NVIDIA documents.
    counted:     count instructions and memory transactions.
    latencies:   of the GPU, if `counted`.
    steps:       number of executed basic blocks after which a kernel counts as endless.
    notes:       the notes by their text, and how often each occurred.
    counters:    by kernel, if `counted`.
    """

    races: bool = True
    unwritten: bool = True
    approximate: bool = True
    counted: bool = False
    latencies: Latencies = USUAL
    steps: int = 2_000_000
    notes: Counter = field(default_factory=Counter)
    counters: dict[str, Counters] = field(default_factory=dict)

    def note(self, kernel: str, what: str) -> None:
        """Count a note."""
        self.notes[f"{kernel}: {what}"] += 1
