"""Whole models: published logits of tiny checkpoints, random decoders against the CPU, and torch for comparison."""

import json
import os
import time
from pathlib import Path

import numpy as np

import numflow
from experiments.gpu_suite.models import SHAPES, TOY
from experiments.gpu_suite.setting import Setting
from numflow.cpu.program import Program as Processor
from numflow.cuda.program import Program
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource
from numflow.ops import Batch

REPO = Path(__file__).resolve().parents[2]


def fixtures(setting: Setting) -> None:
    """Logits and greedy tokens of every tiny checkpoint of $NUMFLOW_SHARED/fixtures (else shared/, ../shared/)."""
    places = [Path(os.environ.get("NUMFLOW_SHARED") or REPO / "shared"), REPO.parent / "shared"]
    folders = [path.parent for place in places for path in sorted(place.glob("fixtures/*/case.json"))]
    wanted = [folder for folder in folders if folder.name == "llama2"][:1] if setting.quick else folders
    for folder in wanted:
        if setting.is_over:
            return
        case, expected = json.loads((folder / "case.json").read_text()), np.load(folder / "expected.npz")
        if setting.was_tried(fixture=folder.name):
            continue
        with setting.attempt(fixture=folder.name), numflow.load(folder, backend="cuda", activations="f32",
                                                                gpu=setting.device()) as model:
            setting.add(fixture=folder.name, **_compared(model, case, expected, setting.quick))


def _compared(model, case: dict, expected, quick: bool) -> dict:
    """Largest error divided by the standard deviation, and whether the greedy tokens equal the published ones."""
    count, same, found = 3 if quick else None, True, []
    if case["kind"] == "seq2seq":
        for i, (source, prefix) in enumerate(zip(case["encoder_inputs"], case["decoder_prefixes"], strict=True)):
            found.append((model.logits(prefix, encoder_ids=source), expected[f"logits_{i}"]))
    elif case["kind"] == "masked_lm":
        for i, (ids, types) in enumerate(zip(case["prompts"], case["token_type_ids"], strict=True)):
            found.append((model.logits(ids, token_type_ids=types), expected[f"logits_{i}"]))
    else:
        for i, ids in enumerate(case["prompts"][:1 if quick else None]):
            found.append((model.logits(ids[:count]), expected[f"logits_{i}"][:count]))
            greedy = case["greedy"][i][:0 if quick else None]
            same = same and (not greedy or model.generate(ids, max_tokens=len(greedy), ignore_eos=True).ids == greedy)
    worst = max(float(np.abs(a - b).max() / b.std()) for a, b in found)
    return {"error": worst, "bound": 1e-4, "same_tokens": same, "good": worst < 1e-4 and same}


def random_models(setting: Setting) -> None:
    """A prompt and some tokens at the 1B and the 8B shape, against the CPU executor with the same weights."""
    for name, shape in (TOY if setting.quick else SHAPES).items():
        for kind in ("q4",) if setting.quick else ("q4", "F16") if name == "1b" else ("q4",):
            if setting.is_over:
                return
            if setting.was_tried(model=name, weights=kind):
                continue
            with setting.attempt(model=name, weights=kind):
                network, checkpoint = random_network(shape, kind)
                source = WeightSource(network, checkpoint)
                programs = [Program(network, source, gpu=setting.device()),
                            Processor(network, source, kv_k="f16", kv_v="f16")]
                worst, same = _side_by_side(programs, shape, 5 if setting.quick else 40)
                setting.add(model=name, weights=kind, error=worst, bound=0.15, same_tokens=same, good=worst < 0.15)


def _side_by_side(programs: list, shape: Shape, length: int) -> tuple[float, int]:
    """Largest error divided by the standard deviation, and how many of the 4 most likely tokens agree."""
    tokens, worst, same = np.random.default_rng(0).integers(0, shape.vocabulary, length).tolist(), 0.0, 0
    for program in programs:
        program.reserve(2)
    for step in range(4):
        begin, count = (0, length) if step == 0 else (length + step - 1, 1)
        a, b = (program.run(Batch(np.array(tokens[begin:]), np.arange(begin, begin + count), np.array([0, count]),
                                  np.arange(2)[None], np.array([count - 1]))) for program in programs)
        worst, same = max(worst, float(np.abs(a - b).max() / b.std())), same + int(a.argmax() == b.argmax())
        tokens.append(int(b.argmax()))
    for program in programs:
        program.close()
    return worst, same


def peer(setting: Setting) -> None:
    """Decoding at the same shapes in torch and transformers, bfloat16: one call a token, and replayed as a CUDA
    graph."""
    if setting.simulator:
        setting.add(peer="torch", what="left out: there is no GPU")
        return
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
    except ImportError as error:
        setting.add(peer="torch", what=f"left out: {error}")
        return
    for name, shape in SHAPES.items():
        if setting.was_tried(peer="torch bf16", model=name):
            continue
        with setting.attempt(peer="torch bf16", model=name):
            config = LlamaConfig(**{key: value for key, value in shape.config().items() if key != "rope_theta"},
                                 vocab_size=shape.vocabulary)
            with torch.device("cuda"), torch.no_grad():
                torch.set_default_dtype(torch.bfloat16)
                model = LlamaForCausalLM(config).eval()
                for batch in (1, 8, 64):
                    if setting.is_over:
                        return
                    cache = StaticCache(config=config, max_batch_size=batch, max_cache_len=1024, device="cuda",
                                        dtype=torch.bfloat16)
                    ids, place = torch.ones(batch, 1, dtype=torch.long), torch.tensor([512])

                    def step(model=model, ids=ids, place=place, cache=cache):
                        return model(ids, past_key_values=cache, cache_position=place, use_cache=True).logits

                    for what, run in (("call", step), ("graph", _graphed(torch, step))):
                        took = _timed(torch, run)
                        setting.add(peer="torch bf16", model=name, what=what, batch=batch, tokens_per_s=batch / took,
                                    milliseconds=took * 1e3)
                torch.set_default_dtype(torch.float32)
                del model
                torch.cuda.empty_cache()


def _graphed(torch, step):
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _timed(torch, run, repeats: int = 30) -> float:
    """Seconds of one run."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats
