"""Networks for training, built from the functions of the tape. Weights have the names of their families' files.

A network is a class with `config`, `shapes()` (shape of each weight by name) and `logits(t, w, ...)`. The
specification that runs its files (named in files.toml) describes the same network.
"""

import tomllib
from pathlib import Path

import numpy as np

from numflow.learn.models.tape import Tape, Value
from numflow.network.t5_buckets import bucket

EPS = 1e-5
FILES = tomllib.loads((Path(__file__).parent / "files.toml").read_text(encoding="utf-8"))


class Trained:
    """Base class of networks. plain_norms: files store the weights of norms as they are, not minus 1.

    table_spread: standard deviation of the initial embeddings.
    """

    kind: str
    plain_norms, table_spread = True, 0.05

    @property
    def spec(self) -> str:
        """Name of the specification that runs the written files."""
        return FILES[type(self).__name__]["spec"]

    @property
    def names(self) -> dict:
        """First entries of config.json: architecture, model type and dtype."""
        entries = FILES[type(self).__name__]
        return {"architectures": [entries["architecture"]], "model_type": entries["model_type"], "dtype": "float16"}

    def saved(self, weights: dict[str, Value]) -> dict[str, np.ndarray]:
        """Tensors of the file, float16, by name."""
        return {name: np.ascontiguousarray(w.data.astype(np.float16)) for name, w in weights.items()}


class Decoder(Trained):
    """A decoder: RMSNorm, RoPE, grouped-query attention, gated feed-forward layers, tied embeddings."""

    kind = "causal"

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, groups: int, size: int, ffn: int, **more):
        self.width, self.layers, self.heads, self.groups, self.size, self.ffn = width, layers, heads, groups, size, ffn
        self.vocabulary, self.more = vocabulary, more

    @property
    def config(self) -> dict:
        return {**self.names, "hidden_size": self.width,
                "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "head_dim": self.size,
                "num_key_value_heads": self.groups, "intermediate_size": self.ffn, "vocab_size": self.vocabulary,
                "max_position_embeddings": 256, "rms_norm_eps": EPS, "rope_theta": 10000.0, "hidden_act": "silu",
                "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, **self.more}

    def shapes(self) -> dict[str, tuple]:
        d, layers = self.width, dict[str, tuple]()
        for i in range(self.layers):
            layers |= self.layer_shapes(i, f"model.layers.{i}.")
        return {"model.embed_tokens.weight": (self.vocabulary, d), **layers, "model.norm.weight": (d,)}

    def layer_shapes(self, i: int, p: str) -> dict[str, tuple]:
        return {p + "input_layernorm.weight": (self.width,), p + "post_attention_layernorm.weight": (self.width,),
                **self.mixer_shapes(i, p), **self.ffn_shapes(p)}

    def mixer_shapes(self, i: int, p: str) -> dict[str, tuple]:
        d, q, k = self.width, self.heads * self.size, self.groups * self.size
        return {p + "self_attn.q_proj.weight": (q, d), p + "self_attn.k_proj.weight": (k, d),
                p + "self_attn.v_proj.weight": (k, d), p + "self_attn.o_proj.weight": (d, q)}

    def ffn_shapes(self, p: str) -> dict[str, tuple]:
        return {p + "mlp.gate_proj.weight": (self.ffn, self.width), p + "mlp.up_proj.weight": (self.ffn, self.width),
                p + "mlp.down_proj.weight": (self.width, self.ffn)}

    def logits(self, t: Tape, w: dict[str, Value], ids: np.ndarray) -> Value:
        """ids [B, T] -> [B, T, V]."""
        x = self.streams(t, w, ids)[-1]
        return t.linear(self.norm(t, w, "model.norm", x), w["model.embed_tokens.weight"])

    def streams(self, t: Tape, w: dict[str, Value], ids: np.ndarray) -> list[Value]:
        """The residual stream before each layer and after the last layer, [B, T, D] each."""
        found = [t.embed(w["model.embed_tokens.weight"], ids)]
        for i in range(self.layers):
            p = f"model.layers.{i}."
            x = t.add(found[-1], self.mixer(t, w, p, self.norm(t, w, p + "input_layernorm", found[-1]), i))
            found.append(t.add(x, self.feed(t, w, p, self.norm(t, w, p + "post_attention_layernorm", x))))
        return found

    def norm(self, t, w, name, x):
        return t.rms_norm(x, w[name + ".weight"], EPS)

    def mixer(self, t, w, p, x, i):
        return self.attend(t, w, p, x)

    def attend(self, t, w, p, x, past=None):
        """Attention. past: further keys and values beside those of x (drafts.py); None: none."""
        q, k, v = (t.linear(x, w[f"{p}self_attn.{m}_proj.weight"]) for m in "qkv")
        y = self.look(t, t.rope(q, self.heads, 1e4), t.rope(k, self.groups, 1e4), v, past)
        return t.linear(y, w[p + "self_attn.o_proj.weight"])

    def look(self, t, q, k, v, past):
        keys, values, sees = (k, v, None) if past is None else past.join(t, k, v)
        return t.attention(q, keys, values, self.heads, scale=self.size ** -0.5, sees=sees)

    def feed(self, t, w, p, x):
        gate, up = (t.linear(x, w[f"{p}mlp.{m}_proj.weight"]) for m in ("gate", "up"))
        return t.linear(t.mul(t.act(gate, "silu"), up), w[p + "mlp.down_proj.weight"])


class Mixture(Decoder):
    """A decoder with a mixture of experts: the outputs of the best `chosen` experts are summed."""

    def __init__(self, *args, experts: int, chosen: int):
        super().__init__(*args, num_local_experts=experts, num_experts_per_tok=chosen)
        self.experts, self.chosen = experts, chosen

    def ffn_shapes(self, p):
        p, experts = p + "block_sparse_moe.", {}
        for e in range(self.experts):
            experts |= {f"{p}experts.{e}.w1.weight": (self.ffn, self.width),
                        f"{p}experts.{e}.w3.weight": (self.ffn, self.width),
                        f"{p}experts.{e}.w2.weight": (self.width, self.ffn)}
        return {p + "gate.weight": (self.experts, self.width), **experts}

    def feed(self, t, w, p, x):
        """Run all experts for all tokens. The gates of experts that a token has not chosen are 0."""
        p = p + "block_sparse_moe."
        gates, y = t.gates(t.linear(x, w[p + "gate.weight"]), self.chosen), None
        for e in range(self.experts):
            one, three = (t.linear(x, w[f"{p}experts.{e}.{m}.weight"]) for m in ("w1", "w3"))
            found = t.linear(t.mul(t.act(one, "silu"), three), w[f"{p}experts.{e}.w2.weight"])
            found = t.mul(found, t.take(gates, slice(e, e + 1)))
            y = found if y is None else t.add(y, found)
        return y


class Hybrid(Decoder):
    """A hybrid decoder: three layers with a recurrent state (gated delta rule) for each layer of gated attention."""

    plain_norms = False

    def __init__(self, *args, state_heads: int, state_size: int):
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(args[2])]
        pairs = args[5] // 4  # rotated column pairs, divided among three position axes, which are equal in a text
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]}
        super().__init__(*args, layer_types=kinds, linear_num_key_heads=state_heads,
                         linear_num_value_heads=state_heads, linear_key_head_dim=state_size,
                         linear_value_head_dim=state_size, linear_conv_kernel_dim=4, partial_rotary_factor=0.5,
                         rope_parameters=rope)
        self.kinds, self.state_heads, self.state_size = kinds, state_heads, state_size

    @property
    def config(self):
        return {key: value for key, value in super().config.items() if key != "rope_theta"} | {"rms_norm_eps": 1e-6}

    def mixer_shapes(self, i, p):
        if self.kinds[i] == "full_attention":
            shapes = super().mixer_shapes(i, p)
            shapes[p + "self_attn.q_proj.weight"] = (2 * self.heads * self.size, self.width)
            return shapes | {p + "self_attn.q_norm.weight": (self.size,), p + "self_attn.k_norm.weight": (self.size,)}
        p, h, wide = p + "linear_attn.", self.state_heads, self.state_heads * self.state_size
        return {p + "in_proj_qkv.weight": (3 * wide, self.width), p + "in_proj_z.weight": (wide, self.width),
                p + "in_proj_b.weight": (h, self.width), p + "in_proj_a.weight": (h, self.width),
                p + "conv1d.weight": (3 * wide, 1, 4), p + "dt_bias": (h,), p + "A_log": (h,),
                p + "norm.weight": (self.state_size,), p + "out_proj.weight": (self.width, wide)}

    def norm(self, t, w, name, x, groups=1):
        return t.rms_norm(x, w[name + ".weight"], 1e-6, groups, offset=1.0)

    def mixer(self, t, w, p, x, i):
        return (self.attend if self.kinds[i] == "full_attention" else self.recur)(t, w, p, x)

    def attend(self, t, w, p, x, past=None):
        """Attention whose output is multiplied by a gate. q_proj has query and gate of each head side by side."""
        p, both = p + "self_attn.", np.arange(2 * self.heads * self.size).reshape(self.heads, 2, self.size)
        q, k, v = (t.linear(x, w[f"{p}{m}_proj.weight"]) for m in "qkv")
        gate, q = t.take(q, both[:, 1].ravel()), t.take(q, both[:, 0].ravel())
        q, k = self.norm(t, w, p + "q_norm", q, self.heads), self.norm(t, w, p + "k_norm", k, self.groups)
        q, k = (t.rope(y, heads, 1e4, self.size // 2) for y, heads in ((q, self.heads), (k, self.groups)))
        y = self.look(t, q, k, v, past)
        return t.linear(t.mul(y, t.act(gate, "sigmoid")), w[p + "o_proj.weight"])

    def recur(self, t, w, p, x):
        p, h, wide = p + "linear_attn.", self.state_heads, self.state_heads * self.state_size
        qkv = t.conv(t.linear(x, w[p + "in_proj_qkv.weight"]), w[p + "conv1d.weight"])
        q, k, v = (t.take(qkv, slice(part * wide, (part + 1) * wide)) for part in range(3))
        q, k = t.scale(t.l2_norm(q, h), self.state_size ** -0.5), t.l2_norm(k, h)
        steps = t.act(t.add(t.linear(x, w[p + "in_proj_a.weight"]), w[p + "dt_bias"]), "softplus")
        log_decay = t.mul(steps, t.scale(t.act(w[p + "A_log"], "exp"), -1))
        y = t.delta_rule(q, k, v, log_decay, t.act(t.linear(x, w[p + "in_proj_b.weight"]), "sigmoid"))
        y = t.rms_norm(y, w[p + "norm.weight"], 1e-6, h)
        return t.linear(t.mul(y, t.act(t.linear(x, w[p + "in_proj_z.weight"]), "silu")), w[p + "out_proj.weight"])


class Encoder(Trained):
    """A masked language model: a bidirectional encoder that predicts masked tokens."""

    kind = "masked"

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, ffn: int):
        self.vocabulary, self.width, self.layers, self.heads, self.ffn = vocabulary, width, layers, heads, ffn

    @property
    def config(self) -> dict:
        return {**self.names, "hidden_size": self.width,
                "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "intermediate_size": self.ffn,
                "vocab_size": self.vocabulary, "max_position_embeddings": 256, "norm_eps": EPS, "norm_bias": False,
                "global_attn_every_n_layers": 1, "global_rope_theta": 10000.0, "local_rope_theta": 10000.0,
                "hidden_activation": "gelu", "classifier_activation": "gelu", "attention_bias": False,
                "mlp_bias": False, "decoder_bias": True, "classifier_bias": False, "classifier_pooling": "mean",
                "tie_word_embeddings": True, "pad_token_id": 2, "cls_token_id": 0, "sep_token_id": 1,
                "bos_token_id": 0, "eos_token_id": 1}

    def shapes(self) -> dict[str, tuple]:
        d, layers = self.width, dict[str, tuple]()
        for i in range(self.layers):
            p = f"model.layers.{i}."
            layers |= {p + "attn_norm.weight": (d,)} if i else {}
            layers |= {p + "attn.Wqkv.weight": (3 * d, d), p + "attn.Wo.weight": (d, d), p + "mlp_norm.weight": (d,),
                       p + "mlp.Wi.weight": (2 * self.ffn, d), p + "mlp.Wo.weight": (d, self.ffn)}
        return {"model.embeddings.tok_embeddings.weight": (self.vocabulary, d), "model.embeddings.norm.weight": (d,),
                **layers, "model.final_norm.weight": (d,), "head.dense.weight": (d, d), "head.norm.weight": (d,),
                "decoder.bias": (self.vocabulary,)}

    def logits(self, t: Tape, w: dict[str, Value], ids: np.ndarray, hidden: np.ndarray | None = None) -> Value:
        """ids [B, T], hidden [B, T] (padding) -> [B, T, V]."""
        def norm(name, x):
            return t.layer_norm(x, w[name + ".weight"], EPS)

        d, table = self.width, w["model.embeddings.tok_embeddings.weight"]
        x = norm("model.embeddings.norm", t.embed(table, ids))
        for i in range(self.layers):
            p = f"model.layers.{i}."
            n = norm(p + "attn_norm", x) if i else x
            qkv = t.linear(n, w[p + "attn.Wqkv.weight"])
            q, k, v = (t.take(qkv, slice(part * d, (part + 1) * d)) for part in range(3))
            y = t.attention(t.rope(q, self.heads, 1e4), t.rope(k, self.heads, 1e4), v, self.heads,
                            scale=(d // self.heads) ** -0.5, causal=False, hidden=hidden)
            x = t.add(x, t.linear(y, w[p + "attn.Wo.weight"]))
            both = t.linear(norm(p + "mlp_norm", x), w[p + "mlp.Wi.weight"])
            gate, up = t.take(both, slice(0, self.ffn)), t.take(both, slice(self.ffn, None))
            x = t.add(x, t.linear(t.mul(t.act(gate, "gelu"), up), w[p + "mlp.Wo.weight"]))
        x = t.act(t.linear(norm("model.final_norm", x), w["head.dense.weight"]), "gelu")
        return t.linear(norm("head.norm", x), table, w["decoder.bias"])


class Translator(Trained):
    """An encoder-decoder with relative position biases."""

    kind, table_spread = "pairs", 1.0

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, size: int, ffn: int):
        self.vocabulary, self.width, self.layers, self.heads = vocabulary, width, layers, heads
        self.size, self.ffn = size, ffn

    @property
    def config(self) -> dict:
        return {**self.names, "d_model": self.width,
                "num_layers": self.layers, "num_decoder_layers": self.layers, "num_heads": self.heads,
                "d_kv": self.size, "d_ff": self.ffn, "vocab_size": self.vocabulary, "n_positions": 128,
                "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
                "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "is_encoder_decoder": True,
                "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}

    def shapes(self) -> dict[str, tuple]:
        d, q = self.width, self.heads * self.size
        shapes: dict[str, tuple] = {"shared.weight": (self.vocabulary, d)}
        for side, attentions in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
            for i in range(self.layers):
                for sublayer, name in enumerate(attentions):
                    p = f"{side}.block.{i}.layer.{sublayer}."
                    shapes |= {p + "layer_norm.weight": (d,)} | {f"{p}{name}.{m}.weight": (q, d) for m in "qkv"}
                    shapes[f"{p}{name}.o.weight"] = (d, q)
                p = f"{side}.block.{i}.layer.{len(attentions)}."
                shapes |= {p + "layer_norm.weight": (d,), p + "DenseReluDense.wi.weight": (self.ffn, d),
                           p + "DenseReluDense.wo.weight": (d, self.ffn)}
            shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, self.heads)
            shapes[f"{side}.final_layer_norm.weight"] = (d,)
        return shapes

    def logits(self, t: Tape, w: dict[str, Value], ids: np.ndarray, hidden: np.ndarray, written: np.ndarray) -> Value:
        """Source ids [B, L], hidden [B, L] (padding), decoder input ids `written` [B, T] -> logits [B, T, V]."""
        seen = self.stack(t, w, "encoder", ids, hidden, None)
        x = self.stack(t, w, "decoder", written, hidden, seen)
        return t.linear(t.scale(x, self.width ** -0.5), w["shared.weight"])

    def stack(self, t, w, side, ids, hidden, seen):
        causal, distance = seen is not None, np.arange(ids.shape[1]) - np.arange(ids.shape[1])[:, None]
        bias = (w[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
                bucket(distance, 32, 128, causal))

        def attend(p, name, x, over, **how):
            q, k, v = (t.linear(y, w[f"{p}{name}.{m}.weight"]) for m, y in (("q", x), ("k", over), ("v", over)))
            return t.linear(t.attention(q, k, v, self.heads, scale=1.0, **how), w[f"{p}{name}.o.weight"])

        def norm(p, x):
            return t.rms_norm(x, w[p + "weight"], 1e-6)

        x = t.embed(w["shared.weight"], ids)
        for i in range(self.layers):
            p = f"{side}.block.{i}.layer."
            n = norm(p + "0.layer_norm.", x)
            x = t.add(x, attend(p + "0.", "SelfAttention", n, n, causal=causal, bias=bias,
                                hidden=None if causal else hidden))
            if causal:
                n = norm(p + "1.layer_norm.", x)
                x = t.add(x, attend(p + "1.", "EncDecAttention", n, seen, causal=False, hidden=hidden))
            p += "2." if causal else "1."
            inner = t.act(t.linear(norm(p + "layer_norm.", x), w[p + "DenseReluDense.wi.weight"]), "relu")
            x = t.add(x, t.linear(inner, w[p + "DenseReluDense.wo.weight"]))
        return norm(f"{side}.final_layer_norm.", x)
