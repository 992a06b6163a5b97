"""Calibration: statistics of the inputs of matrices, over a text that the model writes itself or any other."""
