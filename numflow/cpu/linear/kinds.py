"""The kind of a product as a Numba type: a scheme of layout.py and the operand kind of the activations."""

from collections.abc import Mapping

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from numflow.cpu.linear.activations import BF16, F32, INT8, NAMES
from numflow.cpu.simd.value import Value
from numflow.cpu.weights.layout import PAIRS, PANELS, SCHEMES, Panel


def _panels(operand: int) -> Mapping[str, Panel]:
    """Panels for an operand kind, by scheme."""
    panels: dict[int, Mapping[str, Panel]] = {INT8: PANELS, BF16: PAIRS}
    return panels.get(operand, {})


class SchemeType(types.Type):
    """Type of a value without content: a scheme of layout.py, an operand kind, and whether rows end with half a unit.

    panel: whether kernels read a panel (panel.py) of the matrix instead of its packed tile.
    """

    def __init__(self, name: str, operand: int, ragged: bool, panel: bool = False):
        self.scheme = _panels(operand)[name] if panel else SCHEMES[name]
        self.operand, self.int8, self.ragged = operand, operand == INT8, ragged
        self.x_bytes = {INT8: 1, BF16: 2, F32: 4}[operand]
        super().__init__(name=f"Scheme({name}, {NAMES[operand]}, ragged={ragged}, panel={panel})")

    @property
    def panel(self) -> "SchemeType | None":
        """The type for a panel of the same matrix, or None if a panel does not pay."""
        if self.scheme.name not in _panels(self.operand):
            return None
        return SchemeType(self.scheme.name, self.operand, self.ragged, True)


register_model(SchemeType)(models.OpaqueModel)


@intrinsic(prefer_literal=True)
def scheme(typingctx, name, operand, ragged):
    """The type for a scheme's name and an operand kind, for the functions of this room; all arguments are constants."""
    def codegen(context, builder, signature, args):
        return context.get_dummy_value()
    return SchemeType(name.literal_value, operand.literal_value, bool(ragged.literal_value))(
        name, operand, ragged), codegen


@intrinsic
def x_bytes(typingctx, count, kind):
    """Bytes of `count` elements of x."""
    def codegen(context, builder, signature, args):
        return builder.mul(args[0], ir.Constant(args[0].type, kind.x_bytes))
    return types.int64(types.int64, kind), codegen


@intrinsic
def code_bytes(typingctx, count, kind):
    """Bytes of the codes of `count` columns of a tile: whole units, or float weights."""
    def codegen(context, builder, signature, args):
        return ((Value(builder, args[0]) * kind.scheme.unit_bytes) >> 5).llvm
    return types.int64(types.int64, kind), codegen


@intrinsic
def has_panel(typingctx, kind):
    """Constant: whether products with many tokens use a panel of the tile."""
    def codegen(context, builder, signature, args):
        return context.get_constant(types.boolean, kind.panel is not None)
    return types.boolean(kind), codegen
