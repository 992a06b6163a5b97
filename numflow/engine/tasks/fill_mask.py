"""Fill-mask: the most probable tokens at each mask."""

from typing import NamedTuple

import numpy as np

from numflow.decoding.select import largest
from numflow.decoding.settings import checked_count
from numflow.engine.request.ahead import check_masked
from numflow.engine.request.prompt import check_size
from numflow.engine.runner.suspects import finite
from numflow.errors import RequestError


class Filling(NamedTuple):
    """A token for one mask: its text, its id, its probability, and the whole text with this mask filled."""

    token: str
    id: int
    probability: float
    text: str


def fill_mask(model, text: str, top_k: int) -> list[list[Filling]]:
    """See Model.fill_mask."""
    check_masked(model.facts)
    top_k = checked_count("top_k", top_k, 1, model.vocabulary)
    tokenizer = model.tokenizer
    if tokenizer.mask_id is None:
        raise RequestError(f"the tokenizer of {model.network.name} has no mask token")
    check_size(tokenizer, text, model.context, "the text")
    content = tokenizer.encode(text, add_special=False)
    gaps = [index for index, id in enumerate(content) if id == tokenizer.mask_id]
    if not gaps:
        mask = tokenizer.token_text(tokenizer.mask_id)
        raise RequestError(f"the text has no gap; write {mask} where a word is missing")
    ids, types = tokenizer.wrapping.apply(content)
    logits = model.logits(ids, token_type_ids=types if any(types) else None)
    finite(model, logits, "logits")
    rows = [index for index, id in enumerate(ids) if id == tokenizer.mask_id]
    return [_fillings(tokenizer, content, gap, logits[row], top_k) for gap, row in zip(gaps, rows, strict=True)]


def _fillings(tokenizer, content, gap, logits, top_k) -> list[Filling]:
    """The top_k most probable tokens for a mask, best first."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    probabilities = np.exp(scores)
    probabilities /= probabilities.sum()
    best = largest(scores, np.arange(len(scores)), top_k)
    best = best[np.argsort(-scores[best], kind="stable")]
    return [Filling(tokenizer.decode([id], skip_special=False), int(id), float(probabilities[id]),
                    tokenizer.decode([*content[:gap], int(id), *content[gap + 1:]], skip_special=False)) for id in best]
