"""Collectives of the GPUs of a group: copies between GPUs against NCCL, with tensor parallelism over all GPUs."""

import numpy as np

from experiments.gpu_suite.hybrid import SHAPES, TOY, measured, program_of
from experiments.gpu_suite.setting import Setting
from numflow.cuda.compiler import compat
from numflow.errors import DeviceError
from numflow.lab.shapes import random_network
from numflow.partition.cut.devices import parse_devices

MOST = 8  # cards of a group


def collectives(setting: Setting) -> None:
    """Decoding speed and prompt time of each algorithm, and the difference of NCCL's results from those of copies."""
    device = setting.device()
    cards = min(device.cards, MOST)
    device.close()
    if cards < 2:
        setting.add(cards=cards, what="nothing to compare: a group needs two cards, and the driver reports "
                                      f"{'one' if cards else 'none'}")
        return
    try:
        library = f"NCCL {compat.nccl().get_version()}"
    except DeviceError as error:
        library = str(error)
    for name, shape in (TOY if setting.quick else SHAPES).items():
        network, checkpoint = random_network(shape, "q4", fuse=False)
        for count in (2, cards) if cards > 2 else (2,):
            copied = None
            for how in ("copies", "nccl"):
                if setting.is_over:
                    return
                about = {"model": name, "cards": count, "collectives": how}
                if setting.was_tried(**about, library=library):
                    continue
                with setting.attempt(**about, library=library):
                    facts, logits = _measured(setting, network, checkpoint, shape, count, how)
                    copied = logits if how == "copies" else copied
                    off = None if copied is None else float(np.abs(logits - copied).max() / copied.std())
                    setting.add(**about, off=off, **facts)


def _measured(setting: Setting, network, checkpoint, shape, count: int, how: str) -> tuple[dict, np.ndarray]:
    devices = parse_devices("&".join(map(str, range(count))))
    program = program_of(network, checkpoint, devices, None, setting, collectives=how)
    try:
        return measured(program, shape, setting.quick)
    finally:
        program.close()
