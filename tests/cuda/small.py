"""The op cases at sizes that the simulator runs in about a second each."""

from dataclasses import replace

from numflow.cuda.bind import BINDERS
from numflow.learn.cases.attention_cases import SHORT
from numflow.learn.cases.cases import CASES as ALL

SLOW = {"attention-long": (((0, 70),), ((0, 1),)), "attention-window-long": (((0, 110),), ((0, 1),)),
        "attention-distances-long": (((0, 50), (1, 3)),), "index_select-60-of-2-heads": (((0, 70),), ((0, 1),)),
        "attention-entries-1-of-3": (((0, 40),), ((0, 1),)), "index_tokens-3-of-5": (((0, 40),), ((0, 1),)),
        "index_tokens-1-of-40": (((0, 70),), ((0, 1),)),
        **dict.fromkeys(("attention-entries-2-of-4", "attention-entries-2-of-4-best-3"),
                        (((0, 18), (1, 3)), ((1, 6), (0, 3)), ((0, 1), (1, 1)))),
        "attention-entries-2-of-2-best-40": (((0, 83),), ((0, 3),)),
        "linear-130x256-33-rows": (((0, 9),),)}


def _ops(case):
    return {step.op for steps in case.network.entries.values() for step in steps}


def _small(case):
    if case.name in SLOW:
        return replace(case, schedule=SLOW[case.name])
    if case.name.startswith("attention-merged"):
        return replace(case, schedule=SHORT, encoder=(9, 2))
    heavy = case.name.startswith("attention") and sum(n for run in case.schedule for _, n in run) > 45
    return replace(case, schedule=SHORT) if heavy and not case.encoder and case.schedule[0][0][1] == 37 else case


CASES = [_small(case) for case in ALL if _ops(case) <= set(BINDERS)]
# The last op of each kind of case.
ONE_PER_OP = list({max(_ops(case) - {"select_rows", "embed"}, default="embed"): case for case in CASES}.values())
