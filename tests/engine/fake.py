"""A fake model: bytes are tokens, the program generates a given text, and its KV memory is a dict."""

import codecs

import numpy as np

from numflow.engine.model import Model
from numflow.executor.contract import Program
from numflow.ops import Network, View

BOS, EOS, VOCABULARY = 256, 257, 258


class FakeProgram(Program):
    """Next token = rule(history), where the history is read back through the block table, as attention would."""

    block_size, weights_bytes, cross_block_bytes = 4, 0, 0

    def __init__(self, rule):
        self.rule, self.memory, self.blocks, self.batches, self.closed, self.moved = rule, {}, 0, [], False, 0

    def reserve(self, blocks, cross_blocks=0):
        self.blocks = blocks

    def run(self, batch, entry="main", output="logits"):
        self.batches.append(len(batch.tokens))
        assert batch.blocks.max() < self.blocks
        sequence = np.repeat(np.arange(len(batch.blocks)), np.diff(batch.starts))
        for row, (p, token) in enumerate(zip(batch.positions, batch.tokens, strict=True)):
            self.memory[self.place(batch, sequence[row], p)] = int(token)
        if output is None:
            return None
        rows = [self.rule([self.memory[self.place(batch, sequence[row], p)] for p in range(batch.positions[row] + 1)])
                for row in batch.logit_rows]
        return np.array([row if np.ndim(row) else one_hot(row) for row in rows], np.float32)

    def place(self, batch, sequence, position):
        return int(batch.blocks[sequence, position // 4]), int(position % 4)

    block_bytes = 16  # four int32 tokens

    def copy_blocks(self, sources, targets):
        self.load_blocks(targets, self.save_blocks(sources))

    def save_blocks(self, blocks):
        self.moved += len(blocks)
        tokens = [[self.memory.get((block, place), -1) for place in range(4)] for block in blocks]
        return np.array(tokens, np.int32).view(np.uint8)

    def load_blocks(self, blocks, data):
        for block, tokens in zip(blocks, data.view(np.int32), strict=True):
            self.memory.update({(block, place): int(token) for place, token in enumerate(tokens)})

    def close(self):
        self.closed = True


def one_hot(id):
    return np.eye(VOCABULARY, dtype=np.float32)[id] * 20


def writes(text, prompt=1):
    """A rule that continues a prompt of so many tokens by a text (bytes or ids), then EOS forever."""
    ids = list(text)
    return lambda history: (ids + [EOS] * 1000)[len(history) - prompt]


class FakeTokenizer:
    """Bytes as ids; BOS first."""

    bos_id, eos_ids, special_ids, add_bos = BOS, frozenset({EOS}), frozenset({BOS, EOS}), True
    longest = 1

    def encode(self, text, parse_special=True):
        return [BOS, *text.encode()]

    def apply_chat(self, messages):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def stream(self, continues=False):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        class Decoder:
            def push(self, id):
                return decoder.decode(bytes([id]) if id < 256 else b"")

            def flush(self):
                return decoder.decode(b"", final=True)

        return Decoder()


def network(context=64, type="decoder", outputs=("logits", "hidden")):
    facts = {"type": type, "vocabulary": VOCABULARY, "context": context, "layers": 1, "width": 4}
    views = {"logits": View("logits", 0, VOCABULARY), "hidden": View("hidden", 0, VOCABULARY)}
    return Network("fake", {"main": ()}, {}, {}, {}, {name: views[name] for name in outputs}, facts)


def fake_model(rule=None, context=64, tokenizer=True, chunk=512, **options):
    """A model whose next token is rule(history); by default the last token plus one."""
    rule = rule or (lambda history: (history[-1] + 1) % 256)
    return Model(network(context, **options), FakeProgram(rule), FakeTokenizer if tokenizer else None,
                 ends=frozenset({EOS}), bos=BOS, chunk=chunk)


def used_blocks(model):
    return model.runner.blocks.used + model.runner.cross_blocks.used
