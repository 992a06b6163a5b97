"""Training of draft blocks for a model. The model's own weights are not changed.

A block reads the model's hidden state at token i, and token i + 1. It predicts token i + 2. (The network is built by
numflow/network/build/draft.py.) The targets are the model's probabilities, since drafts are accepted by them. To draft
several tokens, the block reads its own hidden state of the token before. Training does the same in a second and a third
pass over the text (arXiv 2503.01840).
"""

import numpy as np

from numflow.learn.models.nets import Decoder, Trained
from numflow.learn.models.tape import Tape, Value, softmax


class Past:
    """Keys and values of the passes over a text so far."""

    def __init__(self):
        self.keys, self.values = list[Value](), list[Value]()

    def join(self, t: Tape, k: Value, v: Value) -> tuple[Value, Value, np.ndarray]:
        """Append the keys and values of a further pass. Return all keys, all values, and the mask of the keys that each
        token of this pass sees [T, L]: keys of the first pass from before the drafts, and one key of each later pass,
        of the token that was drafted in it."""
        self.keys.append(k)
        self.values.append(v)
        rows, latest = np.arange(k.data.shape[1]), len(self.keys) - 1
        distance = rows[:, None] - rows
        sees = [distance >= latest, *(distance == latest - index for index in range(1, latest + 1))]
        return t.join(self.keys, 1), t.join(self.values, 1), np.concatenate(sees, 1)


class Drafting(Trained):
    """A draft block for the model `base`, whose weights are `fixed`.

    words: ids of the tokens that the block can draft, in rising order. alone: the block's file has no weights of the
    model. passes: passes over a text in training, each of which drafts one token further.
    """

    kind, layers, passes = "causal", 1, 3
    alone = False

    def __init__(self, base: Decoder, fixed: dict[str, Value], words: np.ndarray):
        self.base, self.words = base, words
        self.fixed = {name: fixed[name] for name in base.shapes()}

    @property
    def table(self) -> np.ndarray:
        """The model's embeddings [V, D], which are also its output matrix."""
        return self.fixed["model.embed_tokens.weight"].data

    def training_batch(self, ids: np.ndarray) -> dict:
        """A training batch from texts [B, T]: inputs of the block, and the model's probabilities for every pass."""
        t, base = Tape(), self.base
        streams = base.streams(t, self.fixed, ids)
        normed = base.norm(t, self.fixed, "model.norm", streams[-1])
        wanted = softmax(normed.data[:, 1:] @ self.table[self.words].T)
        tokens, passes = ids.shape[1] - 1, self.passes
        counts = np.arange(tokens) >= np.arange(passes)[:, None]  # each pass begins one token later
        return {"inputs": (ids[:, 1:], self.read(streams, normed)[:, :-1]), "targets": np.tile(wanted, (1, passes, 1)),
                "counts": np.broadcast_to(counts.ravel(), (len(ids), passes * tokens))}

    def logits(self, t: Tape, w: dict[str, Value], ids: np.ndarray, hidden: np.ndarray) -> Value:
        """ids [B, T] and the model's hidden state before each -> logits of the next tokens [B, passes * T, words]."""
        x, past, found = self.projected(t, w, Value(hidden)), Past(), []
        for _ in range(self.passes):
            x, normed = self.step(t, w, Value(self.table[ids]), x, past)
            found.append(t.linear(normed, Value(self.table[self.words])))
            x = t.later(x)
        return t.join(found, 1)

    def read(self, streams: list[Value], normed: Value) -> np.ndarray:
        """Hidden state [B, T, W] of the model that the block reads."""
        raise NotImplementedError

    def projected(self, t: Tape, w: dict[str, Value], hidden: Value) -> Value:
        """The model's hidden state, projected to the model's width."""
        return hidden

    def step(self, t: Tape, w: dict[str, Value], token: Value, hidden: Value, past: Past) -> tuple[Value, Value]:
        """The block's hidden state for the next pass [B, T, D], and the input of its output matrix [B, T, D]."""
        raise NotImplementedError


class Further(Drafting):
    """A multi-token prediction block in the model's file (arXiv 2412.19437, section 2.2): a projection and a layer."""

    plain_norms = False

    def shapes(self) -> dict[str, tuple]:
        d, layer = self.base.width, self.base.layers - 1  # the last layer has attention
        return {"mtp.fc.weight": (d, 2 * d), "mtp.pre_fc_norm_embedding.weight": (d,),
                "mtp.pre_fc_norm_hidden.weight": (d,), **self.base.layer_shapes(layer, "mtp.layers.0."),
                "mtp.norm.weight": (d,)}

    @property
    def config(self) -> dict:
        return self.base.config | {"mtp_num_hidden_layers": 1}

    def saved(self, weights: dict[str, Value]) -> dict[str, np.ndarray]:
        """Tensors of the model and its block."""
        return super().saved(self.fixed | weights)

    def read(self, streams, normed):
        return normed.data

    def step(self, t, w, token, hidden, past):
        base, p = self.base, "mtp.layers.0."
        token = base.norm(t, w, "mtp.pre_fc_norm_embedding", token)
        hidden = base.norm(t, w, "mtp.pre_fc_norm_hidden", hidden)
        x = t.linear(t.join([token, hidden], -1), w["mtp.fc.weight"])
        x = t.add(x, base.attend(t, w, p, base.norm(t, w, p + "input_layernorm", x), past))
        x = t.add(x, base.feed(t, w, p, base.norm(t, w, p + "post_attention_layernorm", x)))
        x = base.norm(t, w, "mtp.norm", x)
        return x, x


class Streams(Drafting):
    """An EAGLE-3 draft: a layer in its own file that reads the model's residual stream at three depths (arXiv
    2503.01840).

    The input of its attention is the token's embedding and the projected streams, concatenated. It drafts the most
    common tokens of the model, and its output matrix has their rows of the model's embeddings.
    """

    alone = True
    depths = (2, 3, 4)  # indices in Decoder.streams; 4 is after the last layer

    def shapes(self) -> dict[str, tuple]:
        d, layer = self.base.width, self.base.layer_shapes(0, "midlayer.")
        layer |= {name: (shape[0], 2 * d) for name, shape in layer.items() if name.split(".")[-2] in
                  ("q_proj", "k_proj", "v_proj")}
        return {"fc.weight": (d, len(self.depths) * d), "midlayer.hidden_norm.weight": (d,), **layer,
                "norm.weight": (d,)}

    @property
    def config(self) -> dict:
        """config.json. The layer ids are those of the layers before each stream: depth - 1."""
        return self.base.config | self.names | {
            "num_hidden_layers": 1, "draft_vocab_size": len(self.words), "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": [depth - 1 for depth in self.depths]}

    def saved(self, weights: dict[str, Value]) -> dict[str, np.ndarray]:
        """Tensors of the block. d2t: the model's id of each draft token minus its draft id; t2d: mask of the model's
        tokens that the block can draft."""
        made = super().saved(weights | {"lm_head.weight": Value(self.table[self.words])})
        return made | {"d2t": self.words - np.arange(len(self.words)),
                       "t2d": np.isin(np.arange(self.base.vocabulary), self.words)}

    def read(self, streams, normed):
        return np.concatenate([streams[depth].data for depth in self.depths], -1)

    def projected(self, t, w, hidden):
        return t.linear(hidden, w["fc.weight"])

    def step(self, t, w, token, hidden, past):
        base, p = self.base, "midlayer."
        both = t.join([base.norm(t, w, p + "input_layernorm", token), base.norm(t, w, p + "hidden_norm", hidden)], -1)
        x = t.add(hidden, base.attend(t, w, p, both, past))
        x = t.add(x, base.feed(t, w, p, base.norm(t, w, p + "post_attention_layernorm", x)))
        return x, base.norm(t, w, "norm", x)
