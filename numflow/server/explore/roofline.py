"""The limits of this machine, and the ops of a model between them, in the shape that its last request had."""

import threading
from typing import Any

from numflow.engine.measure.profile import machine_limits, profile
from numflow.server.models.served import Served

CONTEXT, PROMPT, REPEAT = 256, 64, 3  # tokens at most, before a token and of a prompt; runs of each
_TURN = threading.Lock()


def roofline(served: Served) -> dict[str, Any]:
    """Rates of the machine, measured once for a model, and rows by op: of a token after the last request's text, and
    of its prompt.

    The ops run again on tokens without meaning, one measurement at a time, between the steps of requests that are
    here; the lengths are the request's, up to CONTEXT and PROMPT.

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
