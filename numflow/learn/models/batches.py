"""Training batches: tokenizers, windows of a token stream, masked texts, and translation pairs."""

import random
from collections.abc import Iterator

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from numflow.learn.models import german, stories

END = "<|end|>"
SPECIAL = {"causal": [END, stories.USER, stories.ASSISTANT], "masked": ["[CLS]", "[SEP]", "[PAD]", "[MASK]"],
           "pairs": ["<pad>", "</s>"]}
CONTEXT = 128  # tokens per window
_MASK = 3      # id of [MASK]


def plain(rng: random.Random) -> str:
    """A document without the marks of a conversation."""
    return stories.document(rng)[0].replace(stories.USER, "").replace(stories.ASSISTANT, " ")


def texts_of(kind: str, rng: random.Random, count: int) -> list[str]:
    """Training texts for the tokenizer of a kind of network."""
    if kind == "pairs":
        return [" ".join(german.pair(rng)) for _ in range(count)]
    return [plain(rng) for _ in range(count)]


def tokenizer_of(kind: str, vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer for a kind of network. The special tokens have the first ids."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [AddedToken(text, special=True, lstrip=text == "[MASK]") for text in SPECIAL[kind]]
    made.train_from_iterator(texts_of(kind, random.Random(0), 6000), trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    form = {"causal": f"{END} $A", "masked": "[CLS] $A [SEP]", "pairs": "$A </s>"}[kind]
    made.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[(text, made.token_to_id(text)) for text in SPECIAL[kind]])
    return made


def common(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """Ids of the `count` most common tokens of stories and conversations, in rising order."""
    rng, seen = random.Random(0), np.zeros(tokenizer.get_vocab_size(), int)
    for _ in range(6000):
        np.add.at(seen, tokenizer.encode(stories.document(rng)[0]).ids, 1)
    return np.sort(np.argsort(-seen, kind="stable")[:count])


def causal(tokenizer: Tokenizer, seed: int, documents: int, batch: int) -> Iterator[dict]:
    """Batches of windows that begin at the start of a document; the target of a token is the next token."""
    rng = random.Random(seed)
    ids: list[int] = []
    starts: list[int] = []
    for _ in range(documents):
        starts.append(len(ids))
        ids += tokenizer.encode(stories.document(rng)[0]).ids
    stream, choose = np.array(ids), np.random.default_rng(seed)
    begin = np.array([start for start in starts if start + CONTEXT + 1 < len(stream)])
    while True:
        window = stream[choose.choice(begin, batch)[:, None] + np.arange(CONTEXT + 1)]
        yield {"inputs": (window[:, :-1],), "targets": window[:, 1:], "counts": None}


def masked(tokenizer: Tokenizer, seed: int, documents: int, batch: int) -> Iterator[dict]:
    """Batches of texts with 15 % of their tokens replaced by [MASK]."""
    rng, choose = random.Random(seed), np.random.default_rng(seed)
    rows = [tokenizer.encode(plain(rng)).ids[:CONTEXT] for _ in range(documents)]
    while True:
        chosen = [rows[i] for i in choose.integers(0, len(rows), batch)]
        ids, hidden = _padded(chosen, 2)
        counts = (choose.random(ids.shape) < 0.15) & ~hidden & (ids > _MASK)
        counts[:, 1] |= ~counts.any(1)  # every text has at least one mask
        yield {"inputs": (np.where(counts, _MASK, ids), hidden), "targets": ids, "counts": counts}


def pairs(tokenizer: Tokenizer, seed: int, documents: int, batch: int) -> Iterator[dict]:
    """Batches with English ids for the encoder, and German ids shifted by one token for the decoder."""
    rng, choose = random.Random(seed), np.random.default_rng(seed)
    made = [[tokenizer.encode(text).ids for text in german.pair(rng)] for _ in range(documents)]
    while True:
        chosen = [made[i] for i in choose.integers(0, len(made), batch)]
        source, hidden = _padded([s for s, _ in chosen], 0)
        target, unasked = _padded([t for _, t in chosen], 0)
        written = np.pad(target[:, :-1], ((0, 0), (1, 0)))
        yield {"inputs": (source, hidden, written), "targets": target, "counts": ~unasked}


def _padded(rows: list[list[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded ids [B, longest], and the mask of the padding."""
    ids = np.full((len(rows), max(map(len, rows))), pad)
    hidden = np.ones(ids.shape, bool)
    for row, found in enumerate(rows):
        ids[row, :len(found)], hidden[row, :len(found)] = found, False
    return ids, hidden
