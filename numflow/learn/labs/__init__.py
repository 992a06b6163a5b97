"""One file for each lab: its page, its solution, and known mistakes (docs/teaching/labs.md)."""
