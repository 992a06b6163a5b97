"""The batch of a run as the header that kernels read."""

from collections.abc import Mapping, Sequence

import numpy as np

from numflow.cpu.runtime import kernel as field
from numflow.network.windows import table_name

# The field of the address of each array.
FIELDS = {"tokens": field.TOKENS, "positions": field.POSITIONS, "types": field.TYPES, "sequence_of": field.SEQUENCE_OF,
          "starts": field.STARTS, "lengths": field.LENGTHS, "blocks": field.BLOCKS, "logit_rows": field.LOGIT_ROWS,
          "cross_blocks": field.CROSS_BLOCKS, "cross_lengths": field.CROSS_LENGTHS, "slots": field.STATE_SLOTS,
          "adapters": field.ADAPTERS, "wanted_adapters": field.WANTED_ADAPTERS}


def table_fields(windows: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Header fields of the block table of each window, and of its stride."""
    narrow = [window for window in windows if window]
    return {0: (field.BLOCKS, field.BLOCKS_STRIDE)} | {
        window: (field.HEADER_FIELDS + 2 * i, field.HEADER_FIELDS + 2 * i + 1) for i, window in enumerate(narrow)}


def fill_header(header: np.ndarray, arrays: dict[str, np.ndarray], frequencies: np.ndarray, routes: int,
                tables: Mapping[int, tuple[int, int]]) -> None:
    """Write a checked batch (network.batch.checked) and its rotary frequencies (network.by_length) into the header,
    which points to these arrays from then on. tables: of table_fields."""
    for name, address in FIELDS.items():
        header[address] = arrays[name].__array_interface__["data"][0]
    header[field.FREQUENCIES] = frequencies.__array_interface__["data"][0]
    header[field.FREQUENCIES_STRIDE] = frequencies.shape[1]
    tokens = arrays["tokens"].size
    header[field.N_TOKENS], header[field.N_LOGIT_ROWS] = tokens, arrays["logit_rows"].size
    header[field.N_ROUTES], header[field.N_SEQUENCES] = tokens * routes, arrays["lengths"].size
    for window, (address, stride) in tables.items():
        if (table := arrays.get(table_name(window))) is not None:  # else no step of this entry looks it up
            header[address], header[stride] = table.__array_interface__["data"][0], table.shape[1]
    header[field.CROSS_STRIDE] = arrays["cross_blocks"].shape[1]
