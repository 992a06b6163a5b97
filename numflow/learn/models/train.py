"""Training of the models that come with numflow, on a CPU, in NumPy.

    python -m numflow.learn.models.train tiny      train one of MODELS and write trained/tiny, beside this file
    python -m numflow.learn.models.train tiny --steps 60 --out D      a short run, for a test
    python -m numflow.learn.models.train tiny-mtp       train one of DRAFTS for a model in trained/

The folder is as transformers writes one: config.json, tokenizer.json, model.safetensors in float16 (training is in
float32), and training.json with steps, loss and time.
"""

import argparse
import json
import math
import os
import platform
import random
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from numflow.learn.models import batches, drafts, nets, stories
from numflow.learn.models.tape import Tape, Value, f32

TRAINED = Path(__file__).parent / "trained"
# Network, vocabulary size, steps, texts per step, learning rate.
MODELS = {
    "tiny": (lambda v: nets.Decoder(v, 96, 4, 6, 2, 16, 256), 768, 330, 24, 4e-3),
    "tiny-draft": (lambda v: nets.Decoder(v, 32, 2, 2, 1, 16, 96), 768, 930, 24, 6e-3),
    "tiny-moe": (lambda v: nets.Mixture(v, 64, 3, 4, 2, 16, 96, experts=4, chosen=2), 768, 360, 24, 4e-3),
    "tiny-hybrid": (lambda v: nets.Hybrid(v, 64, 4, 4, 2, 16, 160, state_heads=4, state_size=16), 768, 280, 24, 4e-3),
    "tiny-encoder": (lambda v: nets.Encoder(v, 64, 3, 4, 160), 768, 1900, 24, 4e-3),
    "tiny-translator": (lambda v: nets.Translator(v, 64, 2, 4, 16, 192), 512, 1800, 64, 4e-3),
}
# Draft block, its model, number of tokens that it can draft (None: all), steps, texts per step, learning rate.
DRAFTS = {
    "tiny-mtp": (drafts.Further, "tiny-hybrid", None, 600, 24, 4e-3),  # stored in the model's file
    "tiny-eagle": (drafts.Streams, "tiny", 384, 600, 24, 4e-3),
}
TEMPLATE = ("{% for message in messages %}{% if message['role'] == 'user' %}"
            "{{ bos_token + '<|user|>' + message['content'] }}{% elif message['role'] == 'assistant' %}"
            "{{ '<|assistant|>' + message['content'] }}{% else %}"
            "{{ raise_exception('messages are of user and assistant, not of ' + message['role']) }}{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def initial(net, rng: np.random.Generator) -> dict[str, Value]:
    """Initial weights by name, matrices [outputs, inputs]. Matrices that write to the residual stream start smaller."""
    made = {}
    for name, shape in net.shapes().items():
        if name.endswith(("A_log", ".bias")):
            data = np.zeros(shape)
        elif name.endswith("dt_bias"):
            data = np.log(np.expm1(np.geomspace(0.01, 0.5, shape[0])))  # states that decay within 100 .. 2 tokens
        elif "relative_attention_bias" in name:
            data = np.zeros(shape)
        elif len(shape) == 1:
            plain = net.plain_norms or "linear_attn.norm" in name
            data = np.full(shape, 1.0 if plain else 0.0)  # other norms add 1 to the weight
        elif "embed" in name or "shared" in name:
            data = rng.normal(0, net.table_spread, shape)
        else:
            small = name.rsplit(".", 2)[-2] in ("o_proj", "down_proj", "w2", "out_proj", "Wo", "wo", "o")
            data = rng.normal(0, shape[-1] ** -0.5 * ((2 * net.layers) ** -0.5 if small else 1), shape)
            if name.endswith(".q.weight") and net.kind == "pairs":
                data *= net.size ** -0.5
        made[name] = Value(data.astype(f32))
    return made


class Optimiser:
    """Muon for matrices, Adam for embeddings and vectors, with warm-up, cosine decay and gradients clipped to length 1.

    Muon (Jordan and others, 2024) makes all singular values of a matrix's mean gradient equal before the update, so
    that rare directions are learned as fast as common ones. Here it halves the number of steps for a given loss.
    """

    def __init__(self, weights: dict[str, Value], rate: float, steps: int):
        self.weights, self.rate, self.steps, self.step = weights, rate, steps, 0
        self.mean, self.square = ({name: np.zeros_like(w.data) for name, w in weights.items()} for _ in range(2))

    def __call__(self) -> float:
        """Update the weights by their gradients; return the length of the gradient."""
        self.step += 1
        warm = min(60, self.steps // 10 + 1)
        share = min(1, self.step / warm) * (0.02 + 0.98 * 0.5 * (1 + math.cos(
            math.pi * max(0, self.step - warm) / max(1, self.steps - warm))))
        grads = {name: w.grad for name, w in self.weights.items() if w.grad is not None}
        length = math.sqrt(sum(float(np.vdot(g, g)) for g in grads.values()))
        cut = f32(min(1.0, 1.0 / (length + 1e-9)))
        for name, grad in grads.items():
            w = self.weights[name]
            hidden = w.data.ndim == 2 and "embed" not in name and "shared" not in name and "bias" not in name
            if hidden:
                by, rate = self._muon(name, grad * cut), 5 * self.rate
            else:
                by, rate = self._adam(name, grad * cut), self.rate
            if w.data.ndim == 2:
                by = by + f32(0.02) * w.data
            w.data -= f32(rate * share) * by
            w.grad = None
        return length

    def _muon(self, name: str, g: np.ndarray) -> np.ndarray:
        m = self.mean[name]
        m *= f32(0.95)
        m += g
        x = g + f32(0.95) * m
        x = orthogonal(x.T).T if x.shape[0] > x.shape[1] else orthogonal(x)
        return x * f32(max(1, len(g) / g.shape[1]) ** 0.5)

    def _adam(self, name: str, g: np.ndarray) -> np.ndarray:
        m, v = self.mean[name], self.square[name]
        m += f32(0.1) * (g - m)
        v += f32(0.02) * (g * g - v)
        return (m / f32(1 - 0.9 ** self.step)) / (np.sqrt(v / f32(1 - 0.98 ** self.step)) + f32(1e-8))


def orthogonal(x: np.ndarray) -> np.ndarray:
    """The nearest matrix with singular values of about 1, by five Newton-Schulz steps (a polynomial in x x^T)."""
    x = x / f32(np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = f32(3.4445) * x + (f32(-4.775) * a + f32(2.0315) * (a @ a)) @ x
    return x


def train(net, source, steps: int, rate: float, log=print) -> tuple[dict[str, Value], list[float]]:
    """Train a network; return the weights and the loss of each step."""
    weights = initial(net, np.random.default_rng(0))
    change, losses, begin = Optimiser(weights, rate, steps), [], time.perf_counter()
    for step, batch in zip(range(1, steps + 1), source):
        tape = Tape()
        logits = net.logits(tape, weights, *batch["inputs"])
        losses.append(tape.loss(logits, batch["targets"], batch["counts"]))
        tape.backward()
        length = change()
        if step % 50 == 0 or step == steps:
            seconds = time.perf_counter() - begin
            log(f"step {step} loss {np.mean(losses[-50:]):.3f} gradient {length:.2f} {seconds:.0f} s", flush=True)
    return weights, losses


def held_out(net, weights, source, batches_: int = 20) -> tuple[float, float]:
    """Mean loss in nats on held-out texts, and the accuracy of the largest logit."""
    losses, right = [], []
    for _, batch in zip(range(batches_), source):
        tape = Tape()
        logits = net.logits(tape, weights, *batch["inputs"])
        losses.append(tape.loss(logits, batch["targets"], batch["counts"]))
        wanted = batch["targets"] if batch["targets"].ndim == 2 else batch["targets"].argmax(-1)
        same = logits.data.argmax(-1) == wanted
        right.append(same[batch["counts"]] if batch["counts"] is not None else same.ravel())
    return float(np.mean(losses)), float(np.concatenate(right).mean())


def entropy(tokenizer) -> float:
    """Entropy of the generated texts in nats per token: a lower bound of a causal model's loss."""
    rng = random.Random(10**6)
    made = [stories.document(rng) for _ in range(2000)]
    return sum(bits for _, bits in made) * math.log(2) / sum(len(tokenizer.encode(text).ids) for text, _ in made)


def write(folder: Path, net, weights: dict[str, Value], tokenizer, facts: dict) -> None:
    """Write a model folder as transformers does. tokenizer: None for a draft, which uses its model's tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(net.saved(weights), folder / "model.safetensors")
    special = {"causal": {"bos_token": batches.END, "eos_token": batches.END, "chat_template": TEMPLATE},
               "masked": {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"},
               "pairs": {"pad_token": "<pad>", "eos_token": "</s>"}}[net.kind]
    files = {"config.json": net.config, "training.json": facts}
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        files["tokenizer_config.json"] = special
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Value]:
    """Weights of a written model, converted to float32."""
    from safetensors.numpy import load_file

    return {name: Value(data.astype(f32)) for name, data in load_file(folder / "model.safetensors").items()}


def model_of(name: str):
    """A network to train, its tokenizer, and a function that makes batches from a seed and a number of documents."""
    network, vocabulary, _, batch, _ = MODELS[name]
    kind = network(0).kind
    tokenizer = batches.tokenizer_of(kind, vocabulary)
    return (network(tokenizer.get_vocab_size()), tokenizer,
            lambda seed, documents: getattr(batches, kind)(tokenizer, seed, documents, batch))


def draft_of(name: str):
    """A draft block to train, its model's tokenizer, and a function that makes batches. The model is read from TRAINED.
    """
    from tokenizers import Tokenizer

    kind, model, words, _, batch, _ = DRAFTS[name]
    tokenizer = Tokenizer.from_file(str(TRAINED / model / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    base = MODELS[model][0](vocabulary)
    assert isinstance(base, nets.Decoder)
    net = kind(base, read(TRAINED / model), batches.common(tokenizer, words or vocabulary))
    return net, tokenizer, lambda seed, documents: (
        net.training_batch(one["inputs"][0]) for one in batches.causal(tokenizer, seed, documents, batch))


def make(name: str, steps: int | None = None, documents: int = 20000, out: Path | None = None) -> dict:
    """Train one of MODELS or DRAFTS and write its folder; return facts on the training."""
    is_draft = name in DRAFTS
    net, tokenizer, source = draft_of(name) if is_draft else model_of(name)
    *_, planned, batch, rate = (DRAFTS if is_draft else MODELS)[name]
    steps = steps or planned
    begin, used = time.perf_counter(), time.process_time()
    weights, _ = train(net, source(0, documents), steps, rate)
    loss, right = held_out(net, weights, source(1, documents // 10))
    facts = {"model": name, "parameters": sum(w.data.size for w in weights.values()), "steps": steps,
             "texts_a_step": batch, "loss": round(loss, 4), "right": round(right, 4),
             "entropy": round(entropy(tokenizer), 4) if net.kind == "causal" and not is_draft else None,
             "seconds": round(time.perf_counter() - begin), "processor_seconds": round(time.process_time() - used),
             "numpy": np.__version__, "python": platform.python_version()}
    folder, record = TRAINED / name, facts
    if is_draft and not net.alone:
        folder = TRAINED / DRAFTS[name][1]
        record = json.loads((folder / "training.json").read_text(encoding="utf-8")) | {"draft": facts}
    write(out or folder, net, weights, None if is_draft and net.alone else tokenizer, record)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=[*MODELS, *DRAFTS])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--documents", type=int, default=20000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(make(options.model, options.steps, options.documents, options.out))


if __name__ == "__main__":
    main()
