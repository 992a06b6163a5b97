"""Slots of the kernels that multiply, of those that make their operands, and of those that add outliers."""

from numflow.cpu.runtime.kernel import slots

# rows_field: of the batch header. aux: of int8 activations. token_block: tokens whose operand stays in the cache.
# addend: what the product, times a factor, is added to. experts, capacity, groups: as in expert_routes_kernels.py.
# pairs: 1 where a token is two rows of the operand, else 0. panel: panel_bytes for each thread (weights/panel.py).
# Slots that both have are at the same positions.
_BOTH = ("header rows_field x aux codes heads code_bytes head_bytes bias y y_stride rows columns token_block panel "
         "panel_bytes")
LINEAR = slots(f"{_BOTH} addend addend_stride factor pairs")
EXPERT_LINEAR = slots(f"{_BOTH} experts capacity groups pairs")

# a, b: what an activation reads; of norms a is their input. y: where the numbers go too, 0 for nowhere.
# scratch: operands.SCRATCH_BYTES for each thread.
OPERAND = slots("header rows_field columns x aux scratch a a_stride b b_stride y y_stride kind weight bias eps")

# x: the float32 operand; slots, and where each tile's begin.
OUTLIERS = slots("header rows_field x slots starts y y_stride rows columns token_block")
EXPERT_OUTLIERS = slots(" ".join((*OUTLIERS._fields, "experts capacity groups")))
