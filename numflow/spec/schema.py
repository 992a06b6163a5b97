"""Every key that a specification file may hold: its kind, default and description. The reader refuses all others.

The value of an option is a literal of its kind. Numbers and switches may also be expressions over the parameters and
`layer` (expression.py). Every kind may be an inline source table, which reads the value from the checkpoint:
`{config = "hidden_act", gguf = "...", default = "silu", map = {swish = "silu"}}`.
"""

from numflow.spec import kinds
from numflow.spec.bounds import LIMITS
from numflow.spec.kinds import ACTIVATION_ALIASES, ACTIVATIONS, SpecOption
from numflow.spec.residual_sections import BLOCK, RESIDUAL
from numflow.spec.text_sections import TEXT

_bool, _choice, _float, _int, _list, _text = (kinds.boolean, kinds.choice, kinds.number, kinds.integer,
                                              kinds.number_list, kinds.text)
REQUIRED = object()
NAMINGS = ("hf", "gguf", "llama2c")
STACKS = ("encoder", "decoder", "draft")

SECTIONS: dict[str, dict[str, SpecOption]] = {
    "stack": {
        "layers": _int("layers", "number of layers of this stack", 0, 2000),
        "width": _int("hidden", "width of the residual stream (hidden size)"),
        "context": _int("context", "number of positions that the model was trained for"),
        "language": _text("", "text that replaces {language} in tensor names"),
    },
    "embedding": {
        "width": _int("hidden", "columns of the embedding table, where they differ from `hidden` (see project_in)"),
        "project": _choice(("first", "before_norm", "last"), "first", "where project_in is applied: right after the "
                           "look-up; after positions and token types, before the norm; or after the norm"),
        "scale": _float(1.0, "multiplies the token embeddings"),
        "rows": _int(0, "rows of the embedding table and of the output matrix that stand for tokens, from the first "
                        "on; 0 = all", 0),
        "norm": _bool("has('token_embd_norm.weight')", "normalise the sum of the embeddings"),
        "norm_first": _bool(False, "apply that norm before positions and token types are added"),
        "norm_eps": _float(0.0, "epsilon of that norm; 0 = norm.eps", 0, 1),
        "channel_scales": _bool("has('token_embd_scale.weight')", "first of all, each channel x of the token embedding "
                                "becomes (x + shift) * scale, with a stored shift and scale per channel"),
        "position": _choice(("none", "learned", "sinusoidal"), "none", "absolute position embedding that is added"),
        "position_offset": _int(0, "added to the position before the table look-up", 0, 1 << 20),
        "sinusoid": _choice(("halves", "interleaved"), "halves", "all sines, then all cosines; or alternating"),
        "sinusoid_span": _int(0, "frequencies are 10000^(-i / (width / 2 - span)); 1 in fairseq's models", 0),
        "token_types": _bool("has('token_types.weight')", "add token type (segment) embeddings"),
        "task_types": _bool("has('task_types.weight')", "add the embedding of task 0 as well"),
        "dropped_token": _int(-1, "token id whose embedding becomes 0 (token dropout); -1 = none", -1),
        "dropped_keep": _float(1.0, "with dropped_token: all other embeddings of a text are multiplied by this / (1 - "
                               "fraction of dropped tokens in the text)"),
    },
    "norm": {
        "kind": _choice(("rms", "layer", "l2"), "rms", "RMS norm, x / rms(x); layer norm, (x - mean) / std; or L2 "
                        "norm, x / |x|, without weights"),
        "eps": _float("norm_eps", "epsilon: added to the mean square, the variance, or the sum of squares (l2)",
                      above=0, most=1),
        "offset": _float(0.0, "added to the stored weights: 1 where the file stores w - 1"),
        "weighted": _bool(True, "norms have weights, where the spec names a tensor for them"),
    },
    "block": BLOCK,
    "mixer": {
        "kind": _choice(("attention", "conv", "delta", "state_space", "scan", "decay", "state_space_attention",
                         "gated_recurrence", "wkv", "compressed", "experts", "linear", "none"), "attention",
                        "the layer's token mixer. attention: softmax attention. conv: gated short convolution. delta: "
                        "linear attention by the gated delta rule. state_space: state space model, one step size per "
                        "head. scan: selective scan, one step size per channel. decay: linear attention with a fixed "
                        "decay. state_space_attention: state_space and attention on the same input, added. "
                        "gated_recurrence: gated linear recurrence of each channel. wkv: mean of all values, weighed "
                        "by keys, with a decay. compressed: attention over the last tokens and over one entry for each "
                        "window of earlier tokens; one key/value head, keys are values. experts: attention whose query "
                        "and output matrices come from the experts chosen for the token, kv_heads heads each. linear: "
                        "the matrix attn_output alone, no token mixing. none: no mixer"),
    },
    "recurrent": {
        "heads": _int(1, "heads of the recurrent state; for mixer.kind scan: channels"),
        "key_heads": _int("recurrent_heads", "heads of keys and queries; in a state space model: groups of B and C"),
        "key_dim": _int(1, "columns of a key head: rows of a head's state (state size)"),
        "value_dim": _int(1, "columns of a value head"),
        "rank": _int(1, "scan: columns of the low-rank input of the step sizes (dt rank)"),
        "qkv": _choice(("separate", "concat", "groups", "whole"), "= 'groups' if has('ssm_in.weight') else 'concat' if "
                       "has('attn_qkv.weight') else 'separate'", "delta, layout of the input matrices: three matrices; "
                       "one [q k v]; one [q k v.. gate..] per key head; one [q k v gate beta step]"),
        "strengths": _choice(("separate", "groups"), "= 'groups' if has('ssm_ba.weight') else 'separate'", "delta, "
                             "layout of beta (write strength) and step: two matrices; one [beta.. step..] per key "
                             "head"),
        "tiled": _bool(False, "head h uses key head h % key_heads, not h // (heads / key_heads)"),
        "log_rates": _bool(True, "decay rates are stored as logarithms"),
        "by_column": _bool("has('ssm_f_a.weight')", "delta: one decay step per key column, not one per head"),
        "fade": _float(0.0, "delta: log of a state's decay = -fade * sigmoid(e^a * step), a the stored rate; 0 = -e^a "
                       "* softplus(step)", 0, 1e30),
        "beta": _float(1.0, "delta: multiplies beta, the write strength (a sigmoid)"),
        "activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "silu", "activation of queries, keys and values "
                              "(after their convolution, if any); in a gated recurrence: of the output gate"),
        "gate": _choice(("silu", "sigmoid"), "silu", "activation of the output gate"),
        "norm": _choice(("none", "before_gate", "after_gate"), "none", "norm of the recurrent output: before or after "
                        "the multiplication by its gate"),
        "norm_eps": _float("norm_eps", "epsilon of that norm", above=0, most=1),
        "state_type": _choice(("f32", "f16", "bf16", "q8"), "f32", "storage type of the state"),
        "rows": _choice(("parts", "heads", "pairs"), "parts", "scan, row order of ssm_in and ssm_x: [values.. gate..] "
                        "and [steps B C]; [gate.. values..] per head and [B C steps]; [value gate] per channel and "
                        "[steps B C]"),
        "groups": _int(1, "scan: channel groups, each with its own steps, B and C"),
        "inner_norms": _bool(False, "scan: normalise steps, B and C"),
        "inner_norm_eps": _float("norm_eps", "epsilon of those norms", above=0, most=1),
        "least_step": _float(0.0, "lower limit of the steps", 0),
        "most_step": _float(1e30, "upper limit of the steps", 0, most=1e30),
        "in_scale": _float(1.0, "state_space: multiplies the block's input"),
        "out_scale": _float(1.0, "state_space: multiplies the block's output"),
        **{f"{part}_scale": _float(1.0, f"state_space: multiplies the {name} after the input projection")
           for part, name in (("z", "gates"), ("x", "values"), ("b", "keys"), ("c", "queries"), ("dt", "steps"))},
    },
    "conv": {
        "taps": _int(4, "kernel size of the causal depthwise convolution in tokens, the current one included", 1,
                     1 << 10),
        "scale": _float(1.0, "multiplies x + convolution of x (block.convolved)"),
        "kv_scale": _float("conv_scale", "multiplies x + convolution of x (attention.kv_convolved)"),
        "around": _int(0, "kernel size (odd) of a convolution, not causal, of the layer's input; its output is added "
                       "to the layer's output, and a norm follows; 0 = none", 0, 63),
        "around_groups": _int(1, "channel groups of that convolution"),
        "around_activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "tanh", "activation of its output"),
    },
    "attention": {
        "heads": _int("heads", "query heads"),
        "kv_heads": _int("kv_heads", "key/value heads"),
        "head_dim": _int("head_dim", "columns of a query or key head"),
        "value_dim": _int("attention_head_dim", "columns of a value head"),
        "qkv": _choice(("separate", "concat", "gate_concat", "groups", "quarters"), "separate", "layout of the "
                       "projections: three matrices; one [q k v]; one [gate q k v]; one with [q.. k v] per key/value "
                       "head; one with [q v k] per quarter of their columns"),
        "scale": _float("1 / sqrt(attention_head_dim)", "multiplies the scores q . k"),
        "softcap": _float(0.0, "scores become softcap * tanh(score / softcap); 0 = off", 0, 1e30),
        "window": _int(0, "sliding window w: a query attends to its own key and to the w - 1 keys before it; if not "
                       "causal, also to the w - 1 keys after it; 0 = all keys", 0),
        "ahead": _int(0, "not causal, with a window: keys after its own that a query attends to; 0 = window - 1", 0),
        "merged": _bool(False, "decoder beside an encoder: one softmax over its own keys and those of the encoder's "
                        "output, which attn_k, attn_v and the norm of keys make; no separate cross-attention"),
        "chunk": _int(0, "chunked attention, length of a chunk in positions: a query attends only to keys of its own "
                      "chunk; 0 = all keys", 0),
        "causal": _bool(True, "a query attends to no later keys"),
        "q_norm": _choice(("none", "head", "full"), "none", "norm of queries and keys: per head, or over all columns"),
        "q_norm_kind": _choice(("rms", "layer", "l2", "clip"), "= norm_kind", "norm.kind of that norm; clip: each head "
                               "x, times its weights, becomes x * min(1, q_norm_limit / |x|)"),
        "q_norm_limit": _float(1.0, "see q_norm_kind", 1e-9, 1e9),
        "q_norm_eps": _float(0.0, "epsilon of that norm; 0 = norm.eps", 0, 1),
        "v_norm": _choice(("none", "head"), "none", "norm of values, per head"),
        "shared_from": _int(0, "layers from this one on read the keys and values of the last layer before it that has "
                            "their window, and have none of their own; 0 = none", 0),
        "shared_layer": _int(-1, "layer whose keys and values this layer reads, having none of its own; -1 = see "
                             "shared_from", -1),
        "temperature": _float(0.0, "queries are multiplied by 1 + temperature * ln(1 + floor((position + "
                              "temperature_offset) / temperature_length)); 0 = off"),
        "temperature_smooth": _bool(False, "by 1 + temperature * ln(max(1, (position + temperature_offset) / "
                                    "temperature_length)) instead"),
        "temperature_power": _bool(False, "by (1 + (position + temperature_offset) / temperature_length)^temperature "
                                   "instead"),
        "temperature_length": _int(1, "divisor of positions in these formulas"),
        "temperature_offset": _int(0, "added to positions in these formulas", 0),
        "log_scaled": _bool("has('attn_log_scale.weight')", "queries of a head are multiplied by attn_log_scale * "
                            "ln(position + 1) + attn_log_bias"),
        "q_factor": _float(0.0, "queries are multiplied by (q_factor * attn_q_scale)^2 after rotation; 0 = off"),
        "out_norm": _choice(("none", "head"), "none", "norm of attention's output before its gate, per head"),
        "sub_norm": _bool("has('attn_sub_norm.weight')", "a norm before the output projection"),
        "differential": _float(0.0, "differential attention (arXiv 2410.05258), its lambda_init: the second half of "
                               "the heads' outputs, times a learned lambda, is subtracted from the first half's, and a "
                               "norm follows; 0 = off", 0, 1),
        "key_bias": _bool("has('attn_key_bias.weight')", "all scores of a key get a bias per head, exp(rate * "
                          "softplus(attn_key_bias(values))), stored as further columns of the key"),
        "clip": _float(0.0, "clamp queries, keys and values to [-clip, clip] after their projection; 0 = off", 0, 1e30),
        "norm_after_rope": _bool(False, "apply the norm of queries and keys after the rotary embedding"),
        "alibi": _bool(False, "ALiBi: linear position bias, slopes computed from the number of heads"),
        "alibi_max": _float(8.0, "the smallest ALiBi slope is 2^-alibi_max", above=0, most=1000),
        "alibi_scale": _float(1.0, "multiplies the ALiBi slopes"),
        "sinks": _bool("has('attn_sinks.weight')", "attention sinks: one learned extra logit per head"),
        "token_sinks": _bool("has('attn_sink.weight')", "with attention.relative: one extra logit per head and token, "
                             "attn_sink(x)"),
        "gate": _bool("has('attn_gate.weight')", "multiply attention's output by gate_kind(attn_gate(x))"),
        "gate_kind": _choice(("sigmoid", "softplus"), "sigmoid", "activation of that gate"),
        "gate_factor": _float(0.0, "attn_gate(x) is multiplied by (gate_factor * attn_gate_scale)^2; 0 = off"),
        "gate_in_query": _bool(False, "attn_q holds the rows of the gate, behind the query rows of each head"),
        "gate_by_head": _bool(False, "one gate per head, not one per column"),
        "in_scale": _float(1.0, "multiplies the block's input"),
        "key_scale": _float(1.0, "multiplies the keys"),
        "out_scale": _float(1.0, "multiplies the block's output"),
        "buckets": _int(0, "number of relative position buckets (attn_rel_b of the stack's first layer); 0 = none", 0),
        "own_buckets": _bool(False, "each layer has its own attn_rel_b"),
        "bucket_distance": _int(128, "distance from which keys are in the last bucket"),
        "distances": _int(0, "disentangled attention: number of relative position embeddings, half of them for later "
                          "keys; the layer projects them to keys and queries, whose products with the tokens' queries "
                          "and keys are added to the scores; 0 = none", 0, 1 << 16),
        "distance_reach": _int(0, "of each half of these embeddings, the nearer half stands for one distance each, the "
                               "others for logarithmic buckets up to this distance; 0 = one distance each", 0, 1 << 20),
        "distance_products": _choice(("both", "keys", "queries"), "both", "use both products, only those with "
                                     "projected keys, or only those with projected queries"),
        "distance_norm": _bool("has('dist_norm.weight')", "layer norm of these embeddings before their projection"),
        "relative": _int(0, "number of distances to earlier keys for which each head adds a bias to the scores: "
                         "relative_dim learned values, weighed by attn_rel(x); 0 = none", 0, 1 << 16),
        "relative_dim": _int(1, "number of those learned values per distance"),
        "relative_limit": _float(0.0, "the weights attn_rel(x) of a head w, times attn_rel_scale, become w * min(1, "
                                 "relative_limit / |w|); 0 = off", 0, 1e9),
        "kv_convolved": _bool("has('attn_k_conv.weight')", "keys and values x become x + a causal depthwise "
                              "convolution of x over conv.taps tokens, before norm and rotation"),
        "kv_taps": _bool("has('attn_k_taps.weight')", "the kernel of that convolution, stored [K, C] from the current "
                         "token back, is added to attn_k_taps(x), attn_v_taps(x): K values per key/value head"),
        "convolved": _int(0, "compressed convolutional attention (arXiv 2510.04476): queries and keys pass a depthwise "
                          "convolution over conv.taps tokens, then one of this kernel size over all columns of a head; "
                          "(query + key) / 2 is added; the second half of the values is the previous token's; 0 = off",
                          0, 64),
        "own_distances": _bool("has('dist_k.weight')", "dist_k and dist_q project the relative position embeddings, "
                               "not attn_k and attn_q"),
    },
    "latent": {
        "rank": _int(0, "multi-head latent attention: rank of the compressed key/value; 0 = ordinary attention", 0),
        "q_rank": _int(0, "rank of the compressed query; 0 = one query matrix", 0),
        "rope_dim": _int(0, "rotated columns of a head; all heads share one such key", 0),
        "nope_dim": _int(0, "columns of a head that are not rotated", 0),
        "norm_eps": _float("norm_eps", "epsilon of the norms of the compressed query and key/value", above=0, most=1),
        "scale": _float(1.0, "multiplies the compressed key/value after its norm"),
        "q_scale": _float(1.0, "multiplies the compressed query after its norm"),
        "q_raw": _bool(False, "attn_q_b reads the compressed query after and before its norm, side by side"),
        "rope_norm": _bool("has('attn_k_rope_norm.weight')", "normalise the rotated part of keys before the rotation"),
    },
    "compressed": {
        "every": _int(0, "mixer.kind compressed: tokens per window; each window becomes an entry that later tokens "
                      "attend to; 0 = no entries in this layer", 0, 1 << 20),
        "overlap": _bool(False, "an entry also covers the previous window, with separate columns"),
        "out_groups": _int(0, "groups of heads, each with a matrix before the output projection; 0 = none", 0),
        "out_rank": _int(1, "output columns of each of these matrices"),
    },
    "indexer": {
        "heads": _int(0, "sparse attention: heads of an index that selects the keys for attention, or the entries for "
                      "mixer.kind compressed; 0 = attend to all", 0),
        "head_dim": _int(0, "columns of an index head; the first ones (latent.rope_dim, or rope.dims) are rotated", 0),
        "top_k": _int(1, "keys, entries or blocks selected for each query"),
        "pairing": _choice(("half", "adjacent"), "half", "rope.pairing of the index"),
        "last": _bool(False, "rotate the last columns of an index head, not the first"),
        "norm_eps": _float(1e-6, "epsilon of the layer norm of the index keys", above=0, most=1),
        "q_norm": _bool("has('index_q_norm.weight')", "index_q reads a layer norm of the block's input, not the "
                        "compressed query"),
        "log_scaled": _bool("has('index_log_scale.weight')", "queries of an index head are multiplied by "
                            "index_log_scale * ln(position + 1) + index_log_bias"),
        "weighted": _bool("indexer_pooling != 'mean'", "the scores of the index heads are added with weights that "
                          "index_weights computes from the block's input; if false, all weights are 1"),
        "every": _int(1, "tokens per window; the index selects top_k windows, by pooled keys, and their tokens and "
                      "those of the incomplete window are attended to; 1 = each token by its own key", 1, 1 << 20),
        "pooling": _choice(("gated", "mean"), "gated", "key of a window: the mean of its tokens' keys, which have a "
                           "layer norm, weighted by index_pool_gate; or the norm (section norm) of the mean, rotated "
                           "by the position of the first token, and such a norm of each query head"),
        "block": _int(0, "keys per block: each index head selects top_k blocks for the key head with the same number, "
                      "by the largest product with a key of the block; 0 = keys or windows, for all heads together", 0,
                      1 << 20),
        "local": _int(0, "blocks, the last ones up to the query's own, that are selected first", 0),
        "own": _bool(True, "this layer has an index; if false, it reuses the selection of the last layer that has one"),
    },
    "rope": {
        "enabled": _bool(True, "rotary position embedding"),
        "pairing": _choice(("half", "adjacent"), "half", "rotate columns (i, i + dims/2) or (2i, 2i + 1)"),
        "dims": _int("attention_head_dim", "rotated columns of a head, from the first on; an odd number rotates one "
                     "more"),
        "last": _bool(False, "rotate the last columns of a head, not the first"),
        "base": _float("rope_theta", "inv_freq[i] = base^(-2i / dims)", above=0, most=1e30),
        "reverse": _bool(False, "rotate by the negative angle"),
        "divisors": _bool(True, "divide the frequencies by the tensor rope_freqs, where a file has it"),
        "share": _float(1.0, "proportional: fraction of the pairs that are rotated; the others have frequency 0", 0, 1),
        "scaling": _choice(("none", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"), "none",
                           "method that scales the frequencies to long contexts"),
        "factor": _float(1.0, "scaling factor: context / original_context", above=0),
        "original_context": _int("context", "context length before scaling"),
        "low_freq_factor": _float(1.0, "by wavelength: longer than original_context / this is scaled in full", above=0),
        "high_freq_factor": _float(4.0, "by wavelength: shorter than original_context / this is not scaled", above=0),
        "beta_fast": _float(32.0, "yarn: pairs of more rotations in original_context are not scaled", above=0),
        "beta_slow": _float(1.0, "yarn: pairs of fewer rotations in original_context are scaled in full", above=0),
        "truncate": _bool(True, "yarn: round the ends of the ramp between these two to whole dimensions"),
        "attention_factor": _float(0.0, "multiplies cos and sin; 0 = the method's own value", 0),
        "short_attention_factor": _float(0.0, "attention_factor up to original_context; 0 = attention_factor", 0),
        "long_attention_factor": _float(0.0, "attention_factor beyond original_context; 0 = attention_factor", 0),
        "mscale": _float(0.0, "yarn: attention_factor is m(mscale) / m(mscale_all_dim), m(w) = 0.1 w ln(factor) + 1; "
                         "m(1) if either is 0", 0),
        "mscale_all_dim": _float(0.0, "yarn: see mscale", 0),
        "short_factor": _list("none", "longrope: one frequency divisor per pair, up to original_context", above=0),
        "long_factor": _list("none", "longrope: the same beyond original_context", above=0),
    },
    "ffn": {
        "enabled": _bool(True, "this layer has a feed-forward block"),
        "width": _int("ffn_width", "intermediate size"),
        "activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "silu", "activation function"),
        "gated": _bool(True, "down(act(gate(x)) * up(x)), not down(act(up(x)))"),
        "layout": _choice(("separate", "gate_up", "up_gate", "interleaved"), "separate",
                          "gate and up as two matrices or as one, and its row order"),
        "limit": _float(0.0, "swiglu_clamp and silu_clamp: clamp limit of gate and up", 0, 1e30),
        "alpha": _float(0.0, "swiglu_clamp: gate * sigmoid(alpha * gate)"),
        "cut": _float(0.0, "gated: clamp act(gate(x)) and up(x) of dense blocks and shared experts to [-cut, cut]; 0 = "
                      "off", 0, 1e30),
        **{f"xielu_{name}": _float(0.0, f"xielu: value of ffn_act_{name} for files without that tensor")
           for name in ("positive", "negative", "beta", "eps")},
        "sparsity": _float(0.0, "the gate becomes max(gate - (mean + z * std), 0) over the token's columns, z the "
                           "quantile of the normal distribution at this fraction; 0 = off", 0, 0.999999),
        "sub_norm": _bool("has('ffn_sub_norm.weight')", "a norm before ffn_down"),
        "token_shift": _bool(False, "gate and up read a mix of the token and the one before; the output is multiplied "
                             "by sigmoid(ffn_gate(x))"),
        "gate_scale": _float(1.0, "multiplies the output of ffn_gate"),
        "in_factor": _float(0.0, "the outputs of ffn_gate and ffn_up are multiplied by in_factor * ffn_gate_scale and "
                            "in_factor * ffn_up_scale; 0 = off"),
        "out_scale": _float(1.0, "multiplies the block's output"),
        "adapter_width": _int(0, "intermediate size of an adapter, up(act(down(norm(x)))) of the residual stream x "
                              "behind the block; its output is added; 0 = none", 0),
        "adapter_adds": _choice(("normed", "sum"), "normed", "the adapter's output is added to norm(x) or to x"),
    },
    "moe": {
        "enabled": _bool(False, "this layer routes tokens to experts"),
        "experts": _int("experts", "number of routed experts", 0),
        "top_k": _int("experts_per_token", "routed experts per token", 0),
        "width": _int("expert_width", "intermediate size of an expert", 0),
        "score": _choice(("softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer", "sqrt_softplus"),
                         "softmax", "gates: softmax or sigmoid of all logits; softmax or sigmoid of the chosen logits; "
                         "for each choice a softmax over the experts near the best one left; sqrt(softplus(logit))"),
        "by_token": _bool("has('ffn_experts_of.weight')", "a table (ffn_experts_of) tells the experts of each token "
                          "id; the router computes their gates"),
        "softcap": _float(0.0, "router logits become softcap * tanh(logit / softcap); 0 = off", 0, 1e30),
        "jitter": _float(0.01, "sparsemixer: half the relative distance from the best up to which experts are near", 0),
        "normalize": _bool(False, "divide the gates of the chosen experts by their sum"),
        "least_sum": _float(0.0, "lower limit of that sum", 0, 1),
        "scale": _float(1.0, "multiplies the gates"),
        "groups": _int(1, "number of expert groups; experts are chosen from the best top_groups groups"),
        "top_groups": _int(1, "number of groups that experts are chosen from"),
        "group_best": _int(2, "number of best scores in a group, whose sum is the group's score"),
        "layout": _choice(("separate", "gate_up", "up_gate", "interleaved"), "separate",
                          "gate and up of an expert as two matrices or as one, and its row order"),
        "transposed": _bool(False, "expert matrices are stored [inputs, outputs], unless their shape says otherwise"),
        "activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "= ffn_activation", "activation of routed experts"),
        "cut": _float(0.0, "ffn.cut of routed experts", 0, 1e30),
        "gate_softcap": _float(0.0, "SiLU of the gate becomes softcap(gate) * sigmoid(gate), softcap(x) = cap * tanh(x "
                               "/ cap); 0 = off", 0, 1e30),
        "up_softcap": _float(0.0, "experts' up becomes softcap(up), with gate_softcap", 0, 1e30),
        "spare_experts": _int(0, "number of experts behind these that are ignored, with their part of exp_probs_b "
                              "(experts for input other than text)", 0, 1 << 16),
        "through_experts": _int(0, "number of identity experts behind these: no matrices, output = input", 0, 1 << 16),
        "void_experts": _int(0, "number of zero experts behind those: no matrices, output 0", 0, 1 << 16),
        "always": _int(0, "number of shared experts that the router scores as its last outputs: each token uses them "
                       "beside its top_k, with gates from the same sum; their tensors are stacks", 0, 1 << 16),
        "late": _bool(False, "the layer has a dense block too, and the experts' output is added after the next layer"),
        "gate_input": _bool(False, "gates multiply an expert's input, not its output"),
        "router_scale": _float(1.0, "multiplies the router's logits"),
        "router_width": _int(0, "width of a router of several matrices: down projection, plus that of the layer before "
                             "times a vector, norm, two matrices with GELU, logits; 0 = one matrix", 0),
        "early": _bool(False, "the router reads the layer's input; with moe.beside, the experts read a norm of it too"),
        "beside": _bool(False, "a dense block and experts side by side, each with its own norms; outputs are added"),
        "latent_width": _int(0, "width of the space that experts read and write (ffn_latent_down, ffn_latent_up); 0 = "
                             "none", 0),
        "latent_norm": _bool("has('ffn_latent_norm.weight')", "a norm behind ffn_latent_down"),
        "out_norm": _bool("has('ffn_out_norm_exps.weight')", "a norm of each routed expert's output, before gates "
                          "multiply it (block.post_norm_eps and post_norm_input hold)"),
        "shared_width": _int(0, "intermediate size of the shared expert; 0 = none", 0),
        "shared_layout": _choice(("separate", "gate_up", "up_gate", "interleaved"), "separate",
                                 "gate and up of the shared expert as two matrices or as one, and its row order"),
        "shared_gate": _bool("has('ffn_gate_inp_shexp.weight')", "multiply the shared expert's output by "
                             "sigmoid(ffn_gate_inp_shexp(x))"),
    },
    **RESIDUAL,
    "head": {
        "norm": _bool(True, "a norm after the last layer"),
        "norm_eps": _float(0.0, "epsilon of that norm; 0 = norm.eps", 0, 1),
        "norm_offset": _float("norm_offset", "norm.offset of that norm"),
        "hidden_width": _int(0, "output columns of a projection behind that norm (hidden_proj); 0 = none", 0),
        "tied": _bool("not has('output.weight')", "tied embeddings: the output matrix is the embedding table"),
        "scale": _float(1.0, "multiplies the hidden state before the output matrix"),
        "factor": _float(0.0, "logits are multiplied by factor * output_scale; 0 = off"),
        "softcap": _float(0.0, "logits become softcap * tanh(logit / softcap); 0 = off", 0, 1e30),
        "normalize": _bool(False, "divide each row of the output matrix by its L2 norm"),
        "transform": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES, "none"), "none", "masked-LM head: head_dense, this "
                             "activation and a norm before the output matrix"),
        "transform_norm": _bool(True, "the masked-LM head has that norm"),
        "width": _int("embedding_width if embedding_project != 'first' else stack_width",
                      "output columns of head_dense", 1),
        "enabled": _bool(True, "there is an output matrix; otherwise only hidden states"),
        "scores": _bool("has('score_output.weight')", "classifier or reranker: scores of the whole text, no logits"),
        "score_pooling": _choice(("cls", "last", "mean"), "= 'last' if attention_causal else 'cls'",
                                 "hidden state that is scored: of the first token, of the last, or the mean of all"),
        "score_activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "tanh", "activation after score_dense"),
    },
    "eagle": {
        "layers": _list("none", "draft that reads another model's residual stream: the layers before which it is read, "
                                "from 0; none: the third, the middle and the last but two"),
        "leaving": _bool(False, "the stream is read behind those layers, not before"),
        "norm_before_residual": _bool(False, "the draft's residual stream starts as the norm of its hidden input"),
        "norm_before_fc": _bool("has('eagle_norm.weight')", "a norm of the input of the projection eagle_proj"),
        "offsets": _bool(True, "eagle_words stores the model's token id minus the draft's, not the model's id"),
    },
    **TEXT,
}

MODEL_TYPES = ("decoder", "encoder", "encoder-decoder", "draft")
MODEL_KEYS = {"name": "text", "title": "text", "type": "choice", "source": "text", "license": "text", "notes": "text"}
DETECT_KEYS = {"architectures": "list", "model_type": "list", "gguf": "list", "llama2c": "bool", "when": "bool"}
SOURCE_KEYS = ("config", "gguf", "llama2c", "default", "map", "null", *LIMITS, "what")
TOP_KEYS = ("extends", "extends_part", "model", "detect", "parameters", "tensors", "ignore", "prefix", "transposed",
            "unconfirmed", *SECTIONS, *NAMINGS, *STACKS)
# Keys of a [hf] / [gguf] / [llama2c] table: settings that depend on the file format of the checkpoint.
NAMING_KEYS = ("tensors", "ignore", "prefix", "transposed", "within", "defaults", "draft_layer", "metadata", "written",
               *SECTIONS, *STACKS)
