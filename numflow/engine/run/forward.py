"""Forward passes of several texts together, in ragged batches. A text's result does not depend on other texts."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from numflow.engine.run.core import Core
from numflow.engine.run.forward_job import ForwardJob
from numflow.engine.runner.runner import ROW_VALUES
from numflow.engine.runner.texts import BATCH_ROWS, Text

AHEAD_ROWS = 4 * BATCH_ROWS  # maximum tokens of submitted texts before the first result is awaited


def outputs(core: Core, texts: Iterable[Text], output: str) -> Iterator[np.ndarray]:
    """Output `output` at every position of each text, float32 [len(ids), N], in order."""
    width = core.runner.network.outputs[output].width
    ahead: deque[ForwardJob] = deque()
    try:
        for text in texts:
            job = ForwardJob(text, output, width, max(1, ROW_VALUES // width), core.runner.causal)
            ahead.append(core.submit(job))
            while sum(len(job.result) for job in ahead) > AHEAD_ROWS:
                yield _result(core, ahead)
        while ahead:
            yield _result(core, ahead)
    finally:
        core.leave(ahead)


def _result(core: Core, ahead: deque[ForwardJob]) -> np.ndarray:
    core.drive(ahead[0])
    return ahead.popleft().result
