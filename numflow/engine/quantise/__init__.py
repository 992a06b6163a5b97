"""Quantisation of models: calibration, recipes for a target size, files."""
