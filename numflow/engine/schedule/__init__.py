"""Scheduling: sequences that run next and their KV blocks, as integers: no model, no arrays, no clock."""
