"""Every key that a specification file may hold: its kind, default and meaning. The reader refuses all others.

An option's value is a literal of its kind; for numbers and switches also an expression over the parameters and
`layer` (see expression.py); for any kind also an inline source table, which reads it from the checkpoint:
`{config = "hidden_act", gguf = "...", default = "silu", map = {swish = "silu"}}`.
"""

from numflow.spec import kinds
from numflow.spec.bounds import LIMITS
from numflow.spec.kinds import ACTIVATION_ALIASES, ACTIVATIONS, SpecOption

_bool, _choice, _float, _int, _list, _text = (kinds.switch, kinds.choice, kinds.number, kinds.whole, kinds.numbers,
                                              kinds.text)
REQUIRED = object()
NAMINGS = ("hf", "gguf", "llama2c")
STACKS = ("encoder", "decoder", "draft")

SECTIONS: dict[str, dict[str, SpecOption]] = {
    "stack": {
        "layers": _int("layers", "layers of this stack", 0, 2000),
        "width": _int("hidden", "columns of the residual stream"),
        "context": _int("context", "positions the model was made for"),
        "language": _text("", "the word that stands for {language} in names of tensors"),
    },
    "embedding": {
        "width": _int("hidden", "columns of the embedding table where they differ from `hidden` (project_in follows)"),
        "project": _choice(("first", "before_norm", "last"), "first", "project_in comes before "
                           "positions, types and norm, between these and the norm, or after all"),
        "scale": _float(1.0, "embeddings are multiplied by it"),
        "norm": _bool("has('token_embd_norm.weight')", "a norm after the embeddings are summed"),
        "norm_first": _bool(False, "that norm comes before positions and types are added"),
        "norm_eps": _float(0.0, "added to its mean square or variance; 0 = what other norms have", 0, 1),
        "channel_scales": _bool("has('token_embd_scale.weight')", "before all else each channel becomes (it + a shift) "
                                "* a scale"),
        "position": _choice(("none", "learned", "sinusoidal"), "none", "what is added for the position"),
        "position_offset": _int(0, "added to the position before the look-up", 0, 1 << 20),
        "sinusoid": _choice(("halves", "interleaved"), "halves", "sines then cosines, or alternating"),
        "sinusoid_span": _int(0, "frequencies are 10000^(-i / (half - span)); 1 in fairseq's models", 0),
        "token_types": _bool("has('token_types.weight')", "segment embeddings are added"),
        "task_types": _bool("has('task_types.weight')", "so is that of the first task"),
        "dropped_token": _int(-1, "a token whose embedding is 0; -1: none is", -1),
        "dropped_keep": _float(1.0, "embeddings of others are multiplied by it / (1 - that token's share of the text)"),
    },
    "norm": {
        "kind": _choice(("rms", "layer"), "rms", "x / rms(x), or (x - mean) / std"),
        "eps": _float("norm_eps", "added to the mean square or the variance", above=0, most=1),
        "offset": _float(0.0, "added to the stored weights (1 where the file stores w - 1)"),
        "weighted": _bool(True, "norms have weights where a tensor is named for them"),
    },
    "block": {
        "pre_norm": _bool(True, "normalise the input of attention and feed-forward"),
        "attention_norm": _bool(True, "attention has that norm too"),
        "norm_gate_rank": _int(0, "rank of a gate: its input x becomes x * sigmoid(up(silu(down(x)))); 0: none", 0),
        "post_norm": _choice(("none", "branch", "residual"), "none",
                             "normalise each branch's output before it is added, or the sum after"),
        "attention_post_norm": _bool(True, "attention has that norm too"),
        "parallel": _bool(False, "attention and feed-forward read the same input, both are added"),
        "residual_scale": _float(1.0, "each branch is multiplied by it before it is added"),
        "output_scale": _bool("has('layer_scale.weight')", "the sum after the layer is multiplied by a stored number"),
        "ffn_residual_scale": _float("block_residual_scale", "the same for the feed-forward branch"),
        "convolved": _bool("has('attn_branch_conv.weight')", "to each branch is added a causal convolution of each of "
                           "its columns over conv.taps tokens"),
        "channel_scales": _bool("has('attn_skip_scale.weight')", "each channel of a branch, and of what it is added "
                                "to, becomes (it + a shift) * a scale before"),
        "residual": _choice(("plain", "normed"), "plain", "what a branch is added to: its input before the norm, or "
                            "behind it, times skip_scale"),
        "skip_scale": _float(1.0, "residual = normed: what the normed input is multiplied by"),
        "ffn_skip_scale": _float("block_skip_scale", "the same for the feed-forward branch"),
    },
    "mixer": {
        "kind": _choice(("attention", "conv", "delta", "state_space", "scan", "decay", "state_space_attention",
                         "gated_recurrence", "wkv", "compressed", "linear", "none"), "attention",
                        "what mixes the tokens of a layer: attention; a gated short convolution; linear attention by "
                        "the gated delta rule, of a state space (one step a head, or a scan with one a channel), or "
                        "with a fixed decay; a state space beside attention; a gated recurrence of channels; a mean of "
                        "values whose weights fade; attention beside entries of windows, whose keys are values, one "
                        "for all heads; one matrix (attn_output) in its place, which mixes none; nothing"),
    },
    "recurrent": {
        "heads": _int(1, "heads of the state; of a scan its channels"),
        "key_heads": _int("recurrent_heads", "heads of keys and queries (groups of B and C)"),
        "key_dim": _int(1, "columns of a key, which are rows of a head's state"),
        "value_dim": _int(1, "columns of a value head"),
        "rank": _int(1, "scan: columns that the steps come from"),
        "qkv": _choice(("separate", "concat", "groups", "whole"), "= 'groups' if has('ssm_in.weight') else 'concat' if "
                       "has('attn_qkv.weight') else 'separate'", "delta: three matrices; one of [q k v]; one of "
                       "[q k v.. gate..] per key head; one of [q k v gate beta step]"),
        "strengths": _choice(("separate", "groups"), "= 'groups' if has('ssm_ba.weight') else 'separate'", "delta: the "
                             "matrices of beta and of steps: two, or one of [beta.. step..] per key head"),
        "tiled": _bool(False, "head h uses key head h % key_heads, rather than neighbours the same one"),
        "log_rates": _bool(True, "decay rates are stored as logarithms"),
        "by_column": _bool("has('ssm_f_a.weight')", "delta: a key's columns fade at steps of their own"),
        "fade": _float(0.0, "delta: the logarithm of what a state keeps is minus this times sigmoid(e^a * step) "
                       "for the stored rate a, in place of minus e^a times softplus(step); 0 = that", 0, 1e30),
        "beta": _float(1.0, "delta: the strength of a write, a sigmoid, is multiplied by it"),
        "activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "silu", "what linear attention's input passes, "
                              "behind its convolution where there is one; of a gated recurrence its gate"),
        "gate": _choice(("silu", "sigmoid"), "silu", "activation of the output's gate"),
        "norm": _choice(("none", "before_gate", "after_gate"), "none", "norm of what is found: before it is multiplied "
                        "with its gate, or after"),
        "norm_eps": _float("norm_eps", "added to that norm's mean square", above=0, most=1),
        "state_type": _choice(("f32", "f16", "bf16", "q8"), "f32", "how states of heads are stored"),
        "rows": _choice(("parts", "heads"), "parts", "scan: rows of ssm_in are [values.. gate..] and those of ssm_x "
                        "[steps B C]; or [gate.. values..] per head, and [B C steps]"),
        "inner_norms": _bool(False, "scan: steps, B and C are normalised"),
        "inner_norm_eps": _float("norm_eps", "added to the mean square in those norms", above=0, most=1),
        "least_step": _float(0.0, "steps are at least this", 0),
        "most_step": _float(1e30, "steps are at most this", above=0, most=1e30),
        "in_scale": _float(1.0, "state space: its input is multiplied by it"),
        "out_scale": _float(1.0, "state space: its output is multiplied by it"),
        **{f"{part}_scale": _float(1.0, f"state space: {what} after the input projection are multiplied by it")
           for part, what in (("z", "gates"), ("x", "values"), ("b", "keys"), ("c", "queries"), ("dt", "steps"))},
    },
    "conv": {
        "taps": _int(4, "tokens that a causal depthwise convolution sees, the present one included", 2, 1 << 10),
        "around": _int(0, "tokens that a convolution behind the layer sees of what the layer reads, as many on each "
                       "side, of a text that is there as a whole; it is added, and a norm follows; 0 = none", 0, 63),
        "around_groups": _int(1, "groups of its columns"),
        "around_activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "tanh", "what it passes before it is added"),
    },
    "attention": {
        "heads": _int("heads", "query heads"),
        "kv_heads": _int("kv_heads", "key/value heads"),
        "head_dim": _int("head_dim", "columns of a query or key head"),
        "value_dim": _int("attention_head_dim", "columns of a value head"),
        "qkv": _choice(("separate", "concat", "gate_concat", "groups", "quarters"), "separate",
                       "three matrices; one of [q k v]; one of [gate q k v]; one of [q..q k v] per key/value head; one "
                       "of [q v k] per quarter of their columns"),
        "scale": _float("1 / sqrt(attention_head_dim)", "multiplies q . k"),
        "softcap": _float(0.0, "scores become cap * tanh(score / cap); 0 = off", 0, 1e30),
        "window": _int(0, "a query sees so many keys up to itself, and as many ahead if not causal; 0 = all", 0),
        "chunk": _int(0, "a query sees keys of its own chunk of so many positions only; 0 = all", 0),
        "causal": _bool(True, "queries see no later keys"),
        "q_norm": _choice(("none", "head", "full"), "none", "norm of queries and keys: per head, or over all columns"),
        "v_norm": _choice(("none", "head"), "none", "norm of values, per head"),
        "shared_from": _int(0, "from this layer on a layer has no keys and values: it reads those of the last layer "
                            "before with the same window; 0 = none does", 0),
        "temperature": _float(0.0, "queries are multiplied by 1 + temperature * ln(1 + floor((position + "
                              "temperature_offset) / temperature_length)); 0 = off"),
        "temperature_smooth": _bool(False, "without the floor, from temperature_length on: 1 + temperature * ln(max(1, "
                                    "(position + temperature_offset) / temperature_length))"),
        "temperature_length": _int(1, "positions from one step of it to the next"),
        "temperature_offset": _int(0, "added to the position", 0),
        "sub_norm": _bool("has('attn_sub_norm.weight')", "a norm before the output projection"),
        "clip": _float(0.0, "queries, keys and values are cut at -clip and clip before all else; 0 = off", 0, 1e30),
        "norm_after_rope": _bool(False, "the q/k norm comes after the rotation"),
        "alibi": _bool(False, "linear position bias; slopes from the number of heads"),
        "alibi_max": _float(8.0, "exponent of the smallest slope", above=0, most=1000),
        "alibi_scale": _float(1.0, "multiplies the slopes"),
        "sinks": _bool("has('attn_sinks.weight')", "one learned extra logit per head"),
        "gate": _bool("has('attn_gate.weight')", "the output is multiplied by sigmoid(gate(x)), or as gate_kind says"),
        "gate_kind": _choice(("sigmoid", "softplus"), "sigmoid", "what the gate passes"),
        "gate_in_query": _bool(False, "rows of the gate are in the query matrix, behind those of each head's query"),
        "gate_by_head": _bool(False, "the gate has one number for each head, not one for each column"),
        "in_scale": _float(1.0, "the input is multiplied by it"),
        "key_scale": _float(1.0, "keys are multiplied by it"),
        "out_scale": _float(1.0, "the output is multiplied by it"),
        "buckets": _int(0, "relative position buckets of the stack's first layer; 0 = none", 0),
        "own_buckets": _bool(False, "each layer has a table of them, rather than the first layer of the stack"),
        "bucket_distance": _int(128, "distance of the last bucket"),
        "distances": _int(0, "vectors of distances between tokens, half of them for later keys, of which the layer "
                          "makes keys and queries as of tokens: they meet queries and keys; 0 = none", 0, 1 << 16),
        "distance_reach": _int(0, "the nearer half of each side is exact, others grow logarithmically up to this "
                               "distance; 0 = all are exact", 0, 1 << 20),
        "distance_products": _choice(("both", "keys", "queries"), "both", "which of the two there are"),
        "distance_norm": _bool("has('dist_norm.weight')", "a layer norm of the vectors before"),
        "relative": _int(0, "each head of a token has so many numbers, which are added to its scores with the key at "
                         "that distance before it: sums of learned ones by shares that attn_rel reads off the token; "
                         "0 = none", 0, 1 << 16),
        "relative_dim": _int(1, "how many learned ones there are"),
        "kv_convolved": _bool("has('attn_k_conv.weight')", "to keys and values is added a causal convolution of each "
                              "column over conv.taps tokens, before norm and rotation"),
        "convolved": _int(0, "queries and keys pass two causal convolutions, one of each column over conv.taps tokens, "
                          "then one of all columns of a head over so many, and are added to means of both; the later "
                          "half of the values is the token's before (arXiv 2510.04476); 0 = none do", 0, 64),
        "own_distances": _bool("has('dist_k.weight')", "matrices of their own make these keys and queries"),
    },
    "latent": {
        "rank": _int(0, "rank of the compressed key/value (multi-head latent attention); 0 = ordinary attention", 0),
        "q_rank": _int(0, "rank of the compressed query; 0 = a plain query matrix", 0),
        "rope_dim": _int(0, "columns of a head that are rotated, shared by all heads on the key side", 0),
        "nope_dim": _int(0, "columns of a head that are not rotated", 0),
        "norm_eps": _float("norm_eps", "added to the mean square in the norms of what is compressed", above=0, most=1),
        "scale": _float(1.0, "the compressed key/value is multiplied by it behind its norm"),
        "q_scale": _float(1.0, "the same of the compressed query"),
        "q_raw": _bool(False, "the query matrix reads the compressed query behind its norm and, beside it, before it"),
        "rope_norm": _bool("has('attn_k_rope_norm.weight')", "a norm of the rotated part of keys before that"),
    },
    "compressed": {
        "every": _int(0, "mixer.kind compressed: tokens of a window, which become one entry that later tokens see; 0 = "
                         "no entries in this layer", 0, 1 << 20),
        "overlap": _bool(False, "an entry takes from the window before as well, by columns of its own"),
        "out_groups": _int(0, "groups of heads, each with a matrix of its own before the output projection; 0 = none",
                           0),
        "out_rank": _int(1, "columns that such a matrix gives"),
    },
    "indexer": {
        "heads": _int(0, "heads of an index that chooses the keys which latent attention sees, or the entries of "
                      "mixer.kind compressed; 0 = it sees all", 0),
        "head_dim": _int(0, "columns of such a head, of which the first latent.rope_dim are rotated", 0),
        "top_k": _int(1, "keys that are chosen for each query"),
        "pairing": _choice(("half", "adjacent"), "half", "as in rope"),
        "last": _bool(False, "the columns that are rotated are the last of a head, not the first"),
        "norm_eps": _float(1e-6, "added to the variance in the norm of its keys", above=0, most=1),
        "own": _bool(True, "this layer has an index; else the choice of the last layer before that has one holds"),
    },
    "rope": {
        "enabled": _bool(True, "rotary position embedding"),
        "pairing": _choice(("half", "adjacent"), "half", "rotate columns (i, i + dims/2) or (2i, 2i + 1)"),
        "dims": _int("attention_head_dim", "columns of a head that are rotated, from the first; odd: one more"),
        "last": _bool(False, "those columns are the last of a head, not the first"),
        "base": _float("rope_theta", "inv_freq[i] = base^(-2i / dims)", above=0, most=1e30),
        "reverse": _bool(False, "rotate by minus the angle"),
        "divisors": _bool(True, "what a file has as divisors of the frequencies (rope_freqs) holds here"),
        "share": _float(1.0, "proportional: the part of the pairs that turns; the others stand still", 0, 1),
        "scaling": _choice(("none", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"), "none",
                           "how frequencies are stretched for long contexts"),
        "factor": _float(1.0, "how many times the original context", above=0),
        "original_context": _int("context", "context the model was first trained with"),
        "low_freq_factor": _float(1.0, "llama3", above=0),
        "high_freq_factor": _float(4.0, "llama3", above=0),
        "beta_fast": _float(32.0, "yarn", above=0),
        "beta_slow": _float(1.0, "yarn", above=0),
        "truncate": _bool(True, "yarn: round the borders of the ramp to whole dimensions"),
        "attention_factor": _float(0.0, "multiplies cos and sin; 0 = the scaling's own rule", 0),
        "short_attention_factor": _float(0.0, "longrope: attention_factor up to the original context; 0 = the same", 0),
        "long_attention_factor": _float(0.0, "longrope: attention_factor beyond it; 0 = the same", 0),
        "mscale": _float(0.0, "yarn", 0),
        "mscale_all_dim": _float(0.0, "yarn", 0),
        "short_factor": _list("none", "longrope: one divisor per frequency, up to the original context", above=0),
        "long_factor": _list("none", "longrope: the same, beyond it", above=0),
    },
    "ffn": {
        "enabled": _bool(True, "this layer has a feed-forward part"),
        "width": _int("ffn_width", "columns between the two matrices"),
        "activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "silu", "the non-linearity"),
        "gated": _bool(True, "act(gate(x)) * up(x) rather than act(up(x))"),
        "layout": _choice(("separate", "gate_up", "up_gate", "interleaved"), "separate",
                          "gate and up as two matrices or one, and in which order of rows"),
        "limit": _float(0.0, "swiglu_clamp and silu_clamp: where gate and up are clamped", 0, 1e30),
        "alpha": _float(0.0, "swiglu_clamp: slope of the sigmoid"),
        "cut": _float(0.0, "gated: act(gate(x)) and up(x), of a dense part or shared expert, are cut at -cut and cut; "
                      "0 = off", 0, 1e30),
        **{f"xielu_{name}": _float(0.0, f"xielu: ffn_act_{name} of files without that tensor")
           for name in ("positive", "negative", "beta", "eps")},
        "sparsity": _float(0.0, "the part of a normal distribution's lower values that the gate is cut at, its mean "
                           "and deviation taken from the token's own columns: what is below becomes 0; 0 = off", 0,
                           0.999999),
        "sub_norm": _bool("has('ffn_sub_norm.weight')", "a norm before the down matrix"),
        "token_shift": _bool(False, "matrices read shares of the token and of the one before; the output is multiplied "
                             "by sigmoid(ffn_gate(x))"),
        "gate_scale": _float(1.0, "what the gate's matrix gives is multiplied by it"),
        "out_scale": _float(1.0, "the output is multiplied by it"),
        "adapter_width": _int(0, "columns between two matrices that read the sum behind the feed-forward part, by a "
                              "norm where there is one for them, and whose result is added; 0 = none", 0),
        "adapter_adds": _choice(("normed", "sum"), "normed", "what it is added to: what they read, or that "
                                "before its norm"),
    },
    "moe": {
        "enabled": _bool(False, "this layer routes its tokens to experts"),
        "experts": _int("experts", "how many there are", 0),
        "top_k": _int("experts_per_token", "how many each token uses", 0),
        "width": _int("expert_width", "columns between an expert's two matrices", 0),
        "score": _choice(("softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer", "sqrt_softplus"),
                         "softmax", "probabilities over all experts, independent ones, softmax over the chosen only, "
                         "sigmoid of the chosen logits, one softmax for each choice over those near the best that is "
                         "left, or roots of softplus"),
        "by_token": _bool("has('ffn_experts_of.weight')", "a table says which experts a token has; the router makes "
                          "their gates"),
        "softcap": _float(0.0, "the router's scores become cap * tanh(score / cap); 0 = off", 0, 1e30),
        "jitter": _float(0.01, "sparsemixer: half the relative distance from the best up to which experts are near", 0),
        "normalize": _bool(False, "gates of the chosen experts are divided by their sum"),
        "least_sum": _float(0.0, "the least number that normalize divides by", 0, 1),
        "scale": _float(1.0, "gates are multiplied by it"),
        "groups": _int(1, "experts are chosen from the best groups only"),
        "top_groups": _int(1, "how many groups"),
        "group_best": _int(2, "a group is as good as the sum of this many of its best experts"),
        "layout": _choice(("separate", "gate_up", "up_gate", "interleaved"), "separate",
                          "gate and up of an expert as two matrices or one"),
        "transposed": _bool(False, "expert matrices are stored [inputs, outputs], unless their shape says otherwise"),
        "activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "= ffn_activation", "that of chosen experts"),
        "cut": _float(0.0, "as in ffn, of experts that are chosen", 0, 1e30),
        "spare_experts": _int(0, "how many behind these are passed over, and their part of exp_probs_b: they are for "
                              "other input than text", 0, 1 << 16),
        "through_experts": _int(0, "how many behind these have no matrices and return what they read", 0, 1 << 16),
        "void_experts": _int(0, "how many behind those return nothing", 0, 1 << 16),
        "always": _int(0, "how many more than top_k each token uses: the last of the router, whose gates are in the "
                       "same sum, and whose matrices are those of shared experts, in stacks", 0, 1 << 16),
        "late": _bool(False, "a dense part in their place, and what experts return is added behind the next layer"),
        "gate_input": _bool(False, "gates multiply what an expert reads, not what it returns"),
        "router_scale": _float(1.0, "the router's scores are multiplied by it"),
        "router_width": _int(0, "columns of a router of several matrices: down, to which what the layer before had is "
                             "added, a norm, two with gelu behind them, and the scores; 0 = one matrix", 0),
        "early": _bool(False, "the router, or experts beside a dense part by their norm, read what the layer reads"),
        "beside": _bool(False, "a dense part and the experts side by side, each with norms of its own"),
        "latent_width": _int(0, "columns that the experts' inputs and outputs are projected to and from; 0 = none", 0),
        "shared_width": _int(0, "width of the expert that every token uses; 0 = none", 0),
        "shared_layout": _choice(("separate", "gate_up", "up_gate", "interleaved"), "separate",
                                 "gate and up of the shared expert as two matrices or one"),
        "shared_gate": _bool("has('ffn_gate_inp_shexp.weight')", "the shared expert is multiplied by sigmoid(gate(x))"),
    },
    "side": {
        "enabled": _bool(False, "before the mixer, attention and a feed-forward part that several layers share read "
                         "what the layer does, and the embeddings beside it; side_output of it is added to what the "
                         "mixer reads"),
        "owner": _int("layer", "the number that stands for {owner} in names of tensors of a layer that has one: that "
                      "of the first layer with the same matrices", 0),
        "use": _int(0, "the number that stands for {use} there", 0),
        "rank": _int(0, "columns between two matrices that a layer adds to one that it shares; 0 = none", 0),
    },
    "per_layer": {
        "width": _int(0, "columns of a further embedding that each layer reads for itself; 0 = none", 0),
        "scale": _float("sqrt(per_layer_width)", "those embeddings are multiplied by it"),
    },
    "hyper": {
        "streams": _int(0, "residual streams of which each block reads a sum, and which each block adds to, by gates "
                        "read off them (hyper-connections); 0 = one stream as usual", 0, 64),
        "magnitude": _float(1.0, "what a block adds is multiplied by it"),
        "eps": _float(0.0, "added to the gates", 0, 1),
        "write_eps": _float("hyper_eps", "the same of those by which a block's result is added", 0, 1),
        "balance": _int(0, "each stream becomes a sum of all before that: its factors are a matrix whose columns and "
                        "rows are divided by their sums in turn, columns so many times; 0 = streams stay as they are",
                        0, 1000),
    },
    "passes": {
        "layers": _int(0, "layers of a pass, behind which there is a norm: a pass reads the sum of two streams and "
                       "becomes one of them, the first of which begins as the embeddings and is the result; 0 = there "
                       "are none", 0),
        "first": _bool(False, "the pass of this layer becomes the first stream, not the second"),
    },
    "altup": {
        "streams": _int(0, "residual streams of which a layer computes one and corrects the others by it (alternating "
                        "updates); 0 = one stream as usual", 0, 64),
        "active": _int(0, "which one, from 0", 0),
        "scale": _bool("has('altup_scale.weight')", "per-layer embeddings read the active stream times stored numbers"),
        "laurel_rank": _int(0, "rank of a learned residual beside attention; 0 = none", 0),
    },
    "head": {
        "norm": _bool(True, "a norm after the last layer"),
        "norm_eps": _float(0.0, "added to its mean square or variance; 0 = what other norms have", 0, 1),
        "tied": _bool("not has('output.weight')", "the output matrix is the embedding table"),
        "scale": _float(1.0, "the hidden state is multiplied by it before the output matrix"),
        "softcap": _float(0.0, "logits become cap * tanh(logits / cap); 0 = off", 0, 1e30),
        "normalize": _bool(False, "rows of the output matrix are divided by their length"),
        "transform": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES, "none"), "none",
                             "masked-LM head: dense, this activation, norm, before the output matrix"),
        "transform_norm": _bool(True, "there is that norm"),
        "width": _int("embedding_width if embedding_project != 'first' else stack_width",
                      "columns of what that dense layer makes", 1),
        "enabled": _bool(True, "there is an output matrix; otherwise only hidden states"),
        "scores": _bool("has('score_output.weight')", "scores of the whole text, not words: a classifier or reranker"),
        "score_pooling": _choice(("cls", "last", "mean"), "= 'last' if attention_causal else 'cls'",
                                 "which hidden states they are made of: the first, the last, or the mean of all"),
        "score_activation": _choice((*ACTIVATIONS, *ACTIVATION_ALIASES), "tanh", "the activation after score_dense"),
    },
    "eagle": {
        "layers": _list("none", "a draft that reads another model's stream: before which of its layers, from 0; none: "
                                "before the third, the middle and the last but two"),
        "leaving": _bool(False, "those numbers mean behind the layer"),
        "norm_before_residual": _bool(False, "the residual stream of the draft begins with the norm of what is read"),
        "norm_before_fc": _bool("has('eagle_norm.weight')", "a norm before what is read is projected"),
        "offsets": _bool(True, "eagle_words has differences between a word's id in the model and in the draft"),
    },
    "tokenizer": {
        "kind": _choice(("auto", "tokenizer.json", "sentencepiece", "gguf", "llama2c", "wordpiece", "bpe"), "auto",
                        "which reader; auto goes by the files"),
        "file": _text("", "file of the tokenizer inside the checkpoint's folder"),
        "pre": _text("", "name of a GGUF byte-pair pre-tokenizer"),
        "keep_space_after": _text("", "of GGUF files with a SentencePiece vocabulary: the added tokens, with spaces "
                                      "between, that do not swallow the white space behind them as all others do"),
        "add_bos": SpecOption("bool", None, "put the begin token first; the file's own word if absent"),
        "add_eos": SpecOption("bool", None, "put the end token last; the file's own word if absent"),
        "bos": _text("", "text of the begin token"),
        "eos": _text("", "text of the end token"),
        "unk": _text("", "text of the unknown token"),
        "pad": _text("", "text of the padding token"),
        "chat_template": _text("", "Jinja template over `messages`"),
    },
    "generation": {
        "template": _text("", "prompt template: literal text and {query}, {bos}, {#ID}, {token} pieces"),
        "system_prompt": _text("", "default of the system message"),
        "temperature": _float(0.0, "default", 0),
        "top_k": _int(0, "default", 0),
        "top_p": _float(1.0, "default", 0, 1),
        "decoder_start": _int("decoder_start_token", "encoder-decoder: the first token given to the decoder", -1),
        "forced_bos": _int("forced_bos_token", "encoder-decoder: the first token that is generated", -1),
        "pooling": _choice(("none", "mean", "cls", "last"), "none", "how embeddings are made of hidden states"),
    },
}

# Parameters that options use by default; a spec may leave them undefined only if nothing needs them.
MODEL_TYPES = ("decoder", "encoder", "encoder-decoder", "draft")
MODEL_KEYS = {"name": "text", "title": "text", "type": "choice", "source": "text", "license": "text", "notes": "text"}
DETECT_KEYS = {"architectures": "list", "model_type": "list", "gguf": "list", "llama2c": "bool", "when": "bool"}
SOURCE_KEYS = ("config", "gguf", "llama2c", "default", "map", "null", *LIMITS, "what")
TOP_KEYS = ("extends", "extends_part", "model", "detect", "parameters", "tensors", "ignore", "prefix", "transposed",
            "unconfirmed", *SECTIONS, *NAMINGS, *STACKS)
# Which keys a [hf] / [gguf] / [llama2c] table may hold: what may differ by where the tensors come from.
NAMING_KEYS = ("tensors", "ignore", "prefix", "transposed", "within", "defaults", "draft_layer", "metadata", "written",
               *SECTIONS, *STACKS)
