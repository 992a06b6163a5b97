"""Lowering of the intrinsics of lang/cluster.py (mbarriers, bulk copies): table CLUSTER, like BUILTINS."""

from numflow.cuda.compiler.lowering_types import PointerType, element_at, intrinsic_of, ir, types

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _on_count(name, text, n_operands=0, returns=False):
    """Inline PTX on the mbarrier at shared[at]. Its address is operand $0, or $1 if there is a result; u32 operands
    follow."""
    def typed(shared, at, *others):
        if not isinstance(shared, PointerType) or shared.space != "shared":
            return None
        return (types.uint32 if returns else types.void)(shared, at, *[types.uint32] * len(others))

    def generate(context, builder, sig, args):
        address = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), _I32)
        operands = [address, *args[2:]]
        result = _I32 if returns else ir.VoidType()
        constraints = ",".join(["=r"] * returns + ["r"] * len(operands) + ["~{memory}"])
        call = builder.call(ir.InlineAsm(ir.FunctionType(result, [_I32] * len(operands)), text, constraints,
                                         side_effect=True), operands)
        return call if returns else context.get_dummy_value()

    return intrinsic_of(name, 2 + n_operands, typed, generate)


def _bulk(multicast=False):
    """An asynchronous bulk copy to this block's shared memory, or by multicast to the blocks of a mask."""
    head = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

    def typed(shared, at, source, index, nbytes, count, *blocks):
        spaces = [getattr(pointer, "space", "") for pointer in (shared, source)]
        if spaces != ["shared", "global"]:
            return None
        return types.void(shared, at, source, index, types.uint32, count, *[types.uint32] * len(blocks))

    def generate(context, builder, sig, args):
        target, barrier = (builder.ptrtoint(element_at(builder, args[0], args[i], sig.args[i]), _I32) for i in (1, 5))
        source = builder.ptrtoint(element_at(builder, args[2], args[3], sig.args[3]), _I64)
        operands, text, constraints = [target, source, args[4], barrier], f"{head} [$0], [$1], $2, [$3];", "r,l,r,r"
        if multicast:
            operands.append(builder.trunc(args[6], _I16))
            text, constraints = f"{head}.multicast::cluster [$0], [$1], $2, [$3], $4;", "r,l,r,r,h"
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        builder.call(ir.InlineAsm(kind, text, constraints + ",~{memory}", side_effect=True), operands)
        return context.get_dummy_value()

    return intrinsic_of("bulk", 6 + multicast, typed, generate)


CLUSTER = {
    "count_begin": _on_count("begin_count", "mbarrier.init.shared::cta.b64 [$0], $1;", 1),
    "count_expect": _on_count("expect_bytes", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", 1),
    "count_arrive": _on_count("arrive_at", "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
                              "mbarrier.arrive.shared::cluster.b64 _, [there]; }", 1),
    "count_over": _on_count("turn_is_over", "{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 "
                            "over, [$1], $2; selp.u32 $0, 1, 0, over; }", 1, True),
    "bulk_copy": _bulk(), "bulk_share": _bulk(True),
}
