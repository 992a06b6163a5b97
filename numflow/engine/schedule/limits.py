"""Limits of one step of the scheduler."""

from dataclasses import dataclass

from numflow.errors import RequestError, did_you_mean

BATCHING = ("dynamic", "static")
PREEMPTION = ("swap", "recompute")


@dataclass
class StepLimits:
    """Limits of one step.

    sequences:  maximum number of sequences in a step; a request with more sequences runs alone.
    tokens:     token budget of a step; prompts and drafts are cut to fit.
    chunk:      maximum tokens of one prompt in a step.
    encoder_tokens: maximum tokens that encoders read in a step; a longer text runs alone.
    batching:   "dynamic": requests join and leave at every step; "static": new requests start when all have ended.
    preemption: "swap" or "recompute": treatment of a request's blocks when memory runs out.

    Raises:
        RequestError: a value out of range.
    """

    sequences: int = 32
    tokens: int = 512
    chunk: int = 512
    encoder_tokens: int = 512
    batching: str = "dynamic"
    preemption: str = "swap"

    def __post_init__(self):
        for name in ("sequences", "tokens", "chunk", "encoder_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name} should be a whole number from 1, is {value!r}")
        for name, known in (("batching", BATCHING), ("preemption", PREEMPTION)):
            if getattr(self, name) not in known:
                raise RequestError(f"no {name} {getattr(self, name)!r}{did_you_mean(getattr(self, name), known)}")
