"""Argument slots of the kernels that multiply matrices, that make their operands, that read rows of tables, and that
add outliers."""

from numflow.cpu.runtime.kernel import slots

# rows_field: field of the batch header that counts rows. aux: scales and sums of int8 activations. headers, code_bytes,
# header_bytes: address of the weight headers, bytes of codes and of headers per tile. token_block: tokens whose operand
# stays in the cache. addend: array to which the product, times a factor, is added. experts, capacity, groups: as in
# expert_routes_kernels.py. pairs: 1 where a token is two rows of the operand, else 0. panel: panel_bytes for each
# thread (weights/panel.py). Slots that `linear` and `expert_linear` share are at the same positions.
_BOTH = ("header rows_field x aux codes headers code_bytes header_bytes bias y y_stride rows columns token_block panel "
         "panel_bytes")
LINEAR = slots(f"{_BOTH} addend addend_stride factor pairs")
EXPERT_LINEAR = slots(f"{_BOTH} experts capacity groups pairs")

# rows, columns: of the table. first: row of a larger table that is its first. ids: `count` row numbers for each token,
# whose rows stand side by side in y; 0 for the token of the batch.
_ROWS = "header rows_field y y_stride rows columns first scale ids ids_stride count"
EMBED = slots(f"{_ROWS} codes headers code_bytes header_bytes")
EMBED_OUTLIERS = slots(f"{_ROWS} slots starts")

# a, b: inputs of a gated activation; a alone is the input of a norm or a plain activation. y: address to which the
# values are stored as well, or 0. scratch: operands.SCRATCH_BYTES for each thread.
OPERAND = slots("header rows_field columns x aux scratch a a_stride b b_stride y y_stride kind weight bias eps")

# x: the float32 operand. slots, starts: the outlier slots, and the index of each tile's first slot.
OUTLIERS = slots("header rows_field x slots starts y y_stride rows columns token_block")
EXPERT_OUTLIERS = slots(" ".join((*OUTLIERS._fields, "experts capacity groups")))
