"""First specs for checkpoints that none describes."""
