"""Roofline: this machine's limits, and the rates of a model's ops with the shapes of its last request."""

import threading
from typing import Any

from numflow.engine.measure.profile import machine_limits, profile
from numflow.server.models.served import Served

CONTEXT, PROMPT, REPEAT = 256, 64, 3  # largest context and prompt in tokens; repetitions
_TURN = threading.Lock()


def roofline(served: Served) -> dict[str, Any]:
    """The machine's limits, measured once per model, and rows by op for a decode step after the last request's text and
    for its prompt.

    The ops are measured on arbitrary tokens, one measurement at a time, between the steps of running requests. The
    lengths are those of the last request, up to CONTEXT and PROMPT.

    Raises:
        RequestError: the backend has no profile.
    """
    prompt, new = served.last_request
    with _TURN:
        if served.limits is None:
            served.limits = machine_limits(served.model.program)
        longest = served.model.context - 1
        context, piece = min(prompt + new, CONTEXT, longest), max(1, min(prompt, PROMPT, longest))
        return {"model": served.name, "limits": vars(served.limits), "last_request": {"prompt": prompt, "new": new},
                "token": {"context": context, "ops": profile(served.model, served.limits, 1, context, REPEAT)},
                "prompt": {"tokens": piece, "ops": profile(served.model, served.limits, piece, 0, REPEAT)}}
