"""Making quantised models: calibration, recipes that meet a size, files."""
