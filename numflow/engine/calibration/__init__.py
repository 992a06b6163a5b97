"""Calibration: statistics of the inputs of matrices over a given text, or over text that the model generates."""
