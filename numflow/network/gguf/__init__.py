"""Conversion of checkpoints of any format to GGUF tensors and metadata (as_gguf.py)."""
