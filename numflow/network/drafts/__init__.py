"""Drafts of specs for unknown checkpoints."""
