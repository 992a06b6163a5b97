"""The course (docs/teaching/): labs with functions to write, graders, and running of the functions in the engine."""
