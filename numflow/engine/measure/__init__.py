"""Measurements of a model's speed and of its predictions."""
