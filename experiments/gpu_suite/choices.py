"""Speed of the products of experts, and of sampling."""

import numpy as np

from experiments.gpu_suite.setting import Setting, each, seconds
from numflow.cuda.device.call import Sizes
from numflow.cuda.device.device import Launch
from numflow.cuda.program import Program
from numflow.cuda.sample.sample import BEST, PICK
from numflow.decoding.choice import Choice, encode
from numflow.learn.cases.build import VOCABULARY
from numflow.ops import Batch
from tests.cuda.matrices import experts_case

KINDS = ("F16", "q8", "q4", "Q4_K", "q3h", "q2")
EXPERTS = {"8, 2 chosen": (28672, 4096, 8, 2), "128, 8 chosen": (1536, 2048, 128, 8)}  # N, K of one, experts, chosen
WAYS = {"best": Choice(), "temperature": Choice(0.8, 0.6), "top_k 50": Choice(0.8, 0.6, (("top_k", 50),)),
        "top_p 0.95": Choice(0.8, 0.6, (("top_p", 0.95),)),
        "min_p, top_k, top_p": Choice(0.8, 0.6, (("min_p", 0.02), ("top_k", 50), ("top_p", 0.95)))}


def experts(setting: Setting) -> None:
    """Gate and up of the experts of two known shapes, for 1 to 2048 tokens routed to random experts."""
    rng = np.random.default_rng(0)
    for name, (n, k, count, chosen) in ({"toy": (96, 64, 4, 2)} if setting.quick else EXPERTS).items():
        for kind in ("F16", "q4") if setting.quick else KINDS:
            if setting.was_tried(experts=name, weights=kind):
                continue
            with setting.attempt(experts=name, weights=kind):
                case = experts_case(kind, n, k, count, chosen, fill="repeated")
                program = Program(case.network, case.weights, gpu=setting.device())
                matrix = next(step.weights["weight"] for step, _ in program.bound("main") if step.op == "expert_linear")
                size = case.weights.raw(matrix).rows.nbytes / count
                for tokens in (1, 11) if setting.quick else (1, 4, 8, 16, 64, 256, 2048):
                    if setting.is_over:
                        return
                    ids = rng.integers(0, VOCABULARY, tokens, dtype=np.int32)
                    program.run(Batch(ids, np.arange(tokens), np.array([0, tokens]), np.zeros((1, 0), int),
                                      np.arange(tokens)), output=None)
                    sizes = Sizes((tokens, tokens, tokens * chosen, 1), 1)
                    works = [work for step, calls in program.bound("main") if step.op == "expert_linear"
                             for call in calls for work in call.launches(sizes)]
                    time = each(program.device, works, 2 if setting.quick else 20)
                    used = count * (1 - (1 - chosen / count) ** tokens)  # experts that have any token, as a rule
                    setting.add(experts=name, weights=kind, n=n, k=k, tokens=tokens, microseconds=time * 1e6,
                                gigabytes_per_s=used * size / time / 1e9,
                                tflops=2 * n * k * tokens * chosen / time / 1e12, kernel=works[-1].kernel.name)
                program.close()


def sampling(setting: Setting) -> None:
    """Sampling of one token of each row, with several settings, beside the time to copy the rows to the host."""
    device, rng = setting.device(), np.random.default_rng(0)
    for width in (200,) if setting.quick else (32000, 128256, 262144):
        for rows in (1, 2) if setting.quick else (1, 8, 64):
            if setting.was_tried(vocabulary=width, rows=rows):
                continue
            with setting.attempt(vocabulary=width, rows=rows):
                logits = rng.normal(0, 2.5, (rows, -(-width // 32) * 32)).astype(np.float32)
                memory, ids = device.alloc(logits.nbytes), device.alloc(4 * rows)
                counts, settings = device.alloc(64), device.alloc(64 * rows)
                device.upload(memory.at(), logits)
                device.upload(counts.at(), np.array([rows] * 4, np.int32))
                for way, choice in WAYS.items():
                    if setting.is_over:
                        return
                    device.upload(settings.at(), encode([choice] * rows))
                    more = (settings.at(),) if choice.temperature else ()
                    work = Launch(PICK if choice.temperature else BEST, (rows, 1, 1),
                                  (ids.at(), memory.at(), logits.shape[1], *more, counts.at(), width))
                    setting.add(vocabulary=width, rows=rows, how=way, microseconds=each(device, [work]) * 1e6)
                time = seconds(device, lambda m=memory: device.download(m.at(), m.nbytes), 3)
                setting.add(vocabulary=width, rows=rows, how="download of the logits", microseconds=time * 1e6)
                for held in (memory, ids, counts, settings):
                    device.free(held)
