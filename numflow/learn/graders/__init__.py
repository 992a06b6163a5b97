"""A grader for each way in which a function gets into the engine."""
