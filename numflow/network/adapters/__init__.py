"""Adapters (LoRA and others) for a checkpoint: matched with its tensors, merged, or applied per request."""
