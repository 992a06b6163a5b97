"""Draft blocks: the model's own block that predicts a further token (MTP), or a checkpoint of its own (EAGLE-3).

Both are networks of one layer. Row i of a batch has the token at i + 1 and, as input "hidden", the model's hidden state
at i. Its logits predict the token at i + 2. Output "hidden" is the next row's input. Entry "reduce" of an EAGLE-3 draft
projects the model's "streams" to rows of "hidden".
"""

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.attention import self_attention
from numflow.network.blocks.feed_forward import feed_forward
from numflow.network.build.stack import head, logits_of, transformer_layer
from numflow.network.steps.builder import Builder
from numflow.ops import View


def further_block(b: Builder) -> None:
    """The first MTP block: x = W [norm(embedding); norm(hidden)], one layer, a norm, the model's head
    (arXiv 2412.19437, section 2.2)."""
    width = b.option("stack", "width")
    b.stack = "draft"
    b.layer = b.option("stack", "layers")
    hidden = b.given("hidden", width)
    both = b.view("both", 2 * width)
    token, state = View(both.buffer, 0, width), View(both.buffer, width, width)
    _embed(b, token)
    b.norm("mtp_embd_norm", token, token)
    b.norm("mtp_hidden_norm", hidden, state)
    x = transformer_layer(b, b.linear("mtp_proj", both, b.view("x", width)))
    head(b, x, "mtp_norm")


def eagle_block(b: Builder, streams: int) -> None:
    """An EAGLE-3 draft: a layer whose attention reads [norm(embedding); norm(hidden)], and a head (arXiv 2503.01840).

    streams: columns of the model's output "streams".
    """
    width = b.option("stack", "width")
    _reduce(b, streams, width)
    b.layer = 0
    hidden = b.given("hidden", width)
    both = b.view("both", 2 * width)
    token, state = View(both.buffer, 0, width), View(both.buffer, width, width)
    _embed(b, token)
    b.norm("attn_norm", token, token)
    b.norm("eagle_hidden_norm", hidden, state)
    x = b.view("x", width)
    b.emit("copy", (state if b.option("eagle", "norm_before_residual") else hidden,), (x,), "residual")
    b.emit("add", (x, self_attention(b, both, width)), (x,), "attn_add")
    y = feed_forward(b, b.norm("ffn_norm", x, b.view("normed", width)))
    b.emit("add", (x, y), (x,), "ffn_add")
    b.layer = None
    last = b.outputs["hidden"] = b.view("hidden", width, "logits")
    b.emit("select_rows", (x,), (last,), "select_rows")
    logits_of(b, b.norm("output_norm", last, b.view("last_normed", width, "logits")))


def draft_words(b: Builder, vocabulary: int) -> np.ndarray | None:
    """The model's token id for each id of the draft, int64 [V of the draft]; None if they are the same.

    Raises:
        SpecError: their number is not that of the draft's logits, or one is no id of the model, or two are equal.
    """
    count, tensor = b.outputs["logits"].width, b.names.find("eagle_words")
    if tensor is None:
        if count != vocabulary:
            raise SpecError(f"{b.where}: a draft of {count} words for a model of {vocabulary}: expected a tensor "
                            "eagle_words that tells which of them it has")
        return None
    if tensor.shape != (count,) or tensor.type.name not in ("I64", "I32"):
        raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r} is {tensor.type.name} {list(tensor.shape)}, "
                        f"expected I64 [{count}]")
    words = tensor.raw().reshape(-1).view("<i8" if tensor.type.name == "I64" else "<i4").astype(np.int64)
    words = words + np.arange(count) if b.option("eagle", "offsets") else words
    if wrong := words[(words < 0) | (words >= vocabulary)].tolist():
        raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r}: token id {wrong[0]} is not in the model's "
                        f"range, 0 .. {vocabulary - 1}")
    if len(set(words.tolist())) < count:
        raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r}: two tokens of the draft are the same token "
                        "of the model")
    return words


def _reduce(b: Builder, streams: int, width: int) -> None:
    """Entry "reduce": projection of the model's streams [T, streams] to hidden states [T, width]."""
    b.entry = "reduce"
    given = b.given("streams", streams)
    if b.option("eagle", "norm_before_fc"):
        given = b.norm("eagle_norm", given, b.view("streams_normed", streams))
    b.outputs["reduced"] = b.linear("eagle_proj", given, b.view("reduced", width))
    b.entry = "main"


def _embed(b: Builder, y: View) -> None:
    """Token embeddings without scale or norm."""
    b.emit("embed", (), (y,), "token_embd", {"table": b.matrix("token_embd", None, y.width)})
