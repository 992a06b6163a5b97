"""A checkpoint of any format as a GGUF file would hold it (as_gguf.py)."""
