"""Configurations of encoders and encoder-decoders."""

ENCODERS: dict = {}
TRANSLATORS: dict = {}
