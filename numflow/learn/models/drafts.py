"""Blocks that draft for a model of ours, trained beside it: the model's own weights stay as they are.

A block reads what the model knew at token i, and token i + 1; it says what comes at i + 2. (The network is that of
numflow/network/build/draft.py.) It learns the model's own probabilities, as its drafts are compared with what the model
takes. Where several tokens are drafted at once it reads its own result of the token before; so it does in training, in
a second and a third pass over the text (arXiv 2503.01840).
"""

import numpy as np

from numflow.learn.models.nets import Decoder, Trained
from numflow.learn.models.tape import Tape, Value, softmax


class Past:
    """Keys and values of the passes over a text so far."""

    def __init__(self):
        self.keys, self.values = list[Value](), list[Value]()

    def join(self, t: Tape, k: Value, v: Value) -> tuple[Value, Value, np.ndarray]:
        """All of them with those of a further pass, side by side; and the keys that each of its tokens sees [T, L]: of
        the first pass those before the drafts began, of each later one the key of the token that it drafted."""
        self.keys.append(k)
        self.values.append(v)
        rows, latest = np.arange(k.data.shape[1]), len(self.keys) - 1
        apart = rows[:, None] - rows
        sees = [apart >= latest, *(apart == latest - number for number in range(1, latest + 1))]
        return t.join(self.keys, 1), t.join(self.values, 1), np.concatenate(sees, 1)


class Drafting(Trained):
    """A block that drafts for `base`, whose weights are `fixed`. words: ids of the tokens that it can draft, rising.
    alone: its file has nothing of the model."""

    kind, layers, passes = "causal", 1, 3
    alone = False

    def __init__(self, base: Decoder, fixed: dict[str, Value], words: np.ndarray):
        self.base, self.words = base, words
        self.fixed = {name: fixed[name] for name in base.shapes()}

    @property
    def table(self) -> np.ndarray:
        """The model's table of words [V, D], its output matrix too."""
        return self.fixed["model.embed_tokens.weight"].data

    def asked(self, ids: np.ndarray) -> dict:
        """A batch of texts [B, T]: what the block reads, and what the model says, in each pass over them."""
        t, base = Tape(), self.base
        streams = base.streams(t, self.fixed, ids)
        normed = base.norm(t, self.fixed, "model.norm", streams[-1])
        wanted = softmax(normed.data[:, 1:] @ self.table[self.words].T)
        tokens, passes = ids.shape[1] - 1, self.passes
        counts = np.arange(tokens) >= np.arange(passes)[:, None]  # a pass begins behind the one before
        return {"inputs": (ids[:, 1:], self.read(streams, normed)[:, :-1]), "targets": np.tile(wanted, (1, passes, 1)),
                "counts": np.broadcast_to(counts.ravel(), (len(ids), passes * tokens))}

    def logits(self, t: Tape, w: dict[str, Value], ids: np.ndarray, known: np.ndarray) -> Value:
        """ids [B, T] and what the model knew before each -> [B, passes * T, words], of what comes behind each."""
        x, past, found = self.reduced(t, w, Value(known)), Past(), []
        for _ in range(self.passes):
            x, normed = self.step(t, w, Value(self.table[ids]), x, past)
            found.append(t.linear(normed, Value(self.table[self.words])))
            x = t.later(x)
        return t.join(found, 1)

    def read(self, streams: list[Value], normed: Value) -> np.ndarray:
        """Columns [B, T, W] that the block reads of the model."""
        raise NotImplementedError

    def reduced(self, t: Tape, w: dict[str, Value], known: Value) -> Value:
        """The same at the model's width."""
        return known

    def step(self, t: Tape, w: dict[str, Value], token: Value, known: Value, past: Past) -> tuple[Value, Value]:
        """Rows [B, T, D] that the block hands on, and those that its output matrix reads."""
        raise NotImplementedError


class Further(Drafting):
    """A model's own block that predicts a further token (arXiv 2412.19437, section 2.2): a projection and a layer."""

    plain_norms = False

    def shapes(self) -> dict[str, tuple]:
        d, layer = self.base.width, self.base.layers - 1  # the last one has attention
        return {"mtp.fc.weight": (d, 2 * d), "mtp.pre_fc_norm_embedding.weight": (d,),
                "mtp.pre_fc_norm_hidden.weight": (d,), **self.base.layer_shapes(layer, "mtp.layers.0."),
                "mtp.norm.weight": (d,)}

    @property
    def config(self) -> dict:
        return self.base.config | {"mtp_num_hidden_layers": 1}

    def saved(self, weights: dict[str, Value]) -> dict[str, np.ndarray]:
        """The model with its block."""
        return super().saved(self.fixed | weights)

    def read(self, streams, normed):
        return normed.data

    def step(self, t, w, token, known, past):
        base, p = self.base, "mtp.layers.0."
        token = base.norm(t, w, "mtp.pre_fc_norm_embedding", token)
        known = base.norm(t, w, "mtp.pre_fc_norm_hidden", known)
        x = t.linear(t.join([token, known], -1), w["mtp.fc.weight"])
        x = t.add(x, base.attend(t, w, p, base.norm(t, w, p + "input_layernorm", x), past))
        x = t.add(x, base.feed(t, w, p, base.norm(t, w, p + "post_attention_layernorm", x)))
        x = base.norm(t, w, "mtp.norm", x)
        return x, x


class Streams(Drafting):
    """A layer in a file of its own that reads the model's streams at three depths (arXiv 2503.01840).

    Its attention reads the token and these side by side. Its words are the commonest of the model's, and its output
    matrix has their rows of the model's table.
    """

    alone = True
    depths = (2, 3, 4)  # layers that the streams enter; the last is behind all four

    def shapes(self) -> dict[str, tuple]:
        d, layer = self.base.width, self.base.layer_shapes(0, "midlayer.")
        layer |= {name: (shape[0], 2 * d) for name, shape in layer.items() if name.split(".")[-2] in
                  ("q_proj", "k_proj", "v_proj")}
        return {"fc.weight": (d, len(self.depths) * d), "midlayer.hidden_norm.weight": (d,), **layer,
                "norm.weight": (d,)}

    @property
    def config(self) -> dict:
        """A list of layers that begins with 1 has those that the streams leave."""
        return self.base.config | self.names | {
            "num_hidden_layers": 1, "draft_vocab_size": len(self.words), "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": [depth - 1 for depth in self.depths]}

    def saved(self, weights: dict[str, Value]) -> dict[str, np.ndarray]:
        """The block alone; d2t: of each of its words how far the model's id is ahead, t2d: the model's words it has."""
        made = super().saved(weights | {"lm_head.weight": Value(self.table[self.words])})
        return made | {"d2t": self.words - np.arange(len(self.words)),
                       "t2d": np.isin(np.arange(self.base.vocabulary), self.words)}

    def read(self, streams, normed):
        return np.concatenate([streams[depth].data for depth in self.depths], -1)

    def reduced(self, t, w, known):
        return t.linear(known, w["fc.weight"])

    def step(self, t, w, token, known, past):
        base, p = self.base, "midlayer."
        both = t.join([base.norm(t, w, p + "input_layernorm", token), base.norm(t, w, p + "hidden_norm", known)], -1)
        x = t.add(known, base.attend(t, w, p, both, past))
        x = t.add(x, base.feed(t, w, p, base.norm(t, w, p + "post_attention_layernorm", x)))
        return x, base.norm(t, w, "norm", x)
