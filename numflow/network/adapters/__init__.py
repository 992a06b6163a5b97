"""Adapters (LoRA) on a checkpoint and its network: found, checked, merged."""
