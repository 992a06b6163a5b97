"""The batch header: the arrays and counts of a batch, as kernels read them."""

from collections.abc import Mapping, Sequence

import numpy as np

from numflow.cpu.runtime import kernel as field
from numflow.network.windows import table_name

# Header field of the address of each array.
FIELDS = {"tokens": field.TOKENS, "positions": field.POSITIONS, "types": field.TYPES, "sequence_of": field.SEQUENCE_OF,
          "starts": field.STARTS, "lengths": field.LENGTHS, "blocks": field.BLOCKS, "logit_rows": field.LOGIT_ROWS,
          "cross_blocks": field.CROSS_BLOCKS, "cross_lengths": field.CROSS_LENGTHS, "slots": field.STATE_SLOTS,
          "adapters": field.ADAPTERS, "wanted_adapters": field.WANTED_ADAPTERS}


def table_fields(windows: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Header fields of the block table of each attention window, and of the table's stride."""
    finite = [window for window in windows if window]
    return {0: (field.BLOCKS, field.BLOCKS_STRIDE)} | {
        window: (field.HEADER_FIELDS + 2 * i, field.HEADER_FIELDS + 2 * i + 1) for i, window in enumerate(finite)}


def fill_header(header: np.ndarray, arrays: dict[str, np.ndarray], frequencies: np.ndarray, routes: int,
                tables: Mapping[int, tuple[int, int]]) -> None:
    """Write the addresses of a checked batch (network.batch.checked) and of its rotary frequencies (network.by_length)
    into the header. The arrays must live as long as the header is used.

    tables: result of table_fields.
    """
    for name, address in FIELDS.items():
        header[address] = arrays[name].__array_interface__["data"][0]
    header[field.FREQUENCIES] = frequencies.__array_interface__["data"][0]
    header[field.FREQUENCIES_STRIDE] = frequencies.shape[1]
    tokens = arrays["tokens"].size
    header[field.N_TOKENS], header[field.N_LOGIT_ROWS] = tokens, arrays["logit_rows"].size
    header[field.N_ROUTES], header[field.N_SEQUENCES] = tokens * routes, arrays["lengths"].size
    for window, (address, stride) in tables.items():
        if (table := arrays.get(table_name(window))) is not None:  # else no step of this entry uses it
            header[address], header[stride] = table.__array_interface__["data"][0], table.shape[1]
    header[field.CROSS_STRIDE] = arrays["cross_blocks"].shape[1]
