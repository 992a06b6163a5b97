"""The batch of a run as the header that kernels read."""

import numpy as np

from numflow.cpu import kernel as field
from numflow.network.batch import Limits, checked
from numflow.ops import Batch

# The field of the address of each array.
FIELDS = {"tokens": field.TOKENS, "positions": field.POSITIONS, "types": field.TYPES, "sequence_of": field.SEQUENCE_OF,
          "starts": field.STARTS, "lengths": field.LENGTHS, "blocks": field.BLOCKS, "logit_rows": field.LOGIT_ROWS,
          "cross_blocks": field.CROSS_BLOCKS, "cross_lengths": field.CROSS_LENGTHS}


def fill_header(header: np.ndarray, batch: Batch, limits: Limits, block_size: int, blocks: int, cross_blocks: int,
                routes: int) -> list[np.ndarray]:
    """Write a batch into the header; returns the arrays it points to, which must live as long as the run.

    Raises:
        RequestError: arrays of the batch disagree, or an id or a position is out of range.
    """
    arrays = checked(batch, limits, block_size, blocks, cross_blocks)
    for name, array in arrays.items():
        header[FIELDS[name]] = array.__array_interface__["data"][0]
    tokens = arrays["tokens"].size
    header[field.N_TOKENS], header[field.N_LOGIT_ROWS] = tokens, arrays["logit_rows"].size
    header[field.N_ROUTES], header[field.N_SEQUENCES] = tokens * routes, arrays["lengths"].size
    header[field.BLOCKS_STRIDE] = arrays["blocks"].shape[1]
    header[field.CROSS_STRIDE] = arrays["cross_blocks"].shape[1]
    return list(arrays.values())
