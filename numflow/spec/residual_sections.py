"""Part of the schema: sections about parts of a layer other than mixer and feed-forward block, which are norms and sums
around both, shared blocks, per-layer embeddings and several residual streams."""

from numflow.spec.kinds import SpecOption
from numflow.spec.kinds import boolean as _bool
from numflow.spec.kinds import choice as _choice
from numflow.spec.kinds import integer as _int
from numflow.spec.kinds import number as _float

BLOCK: dict[str, SpecOption] = {
    "pre_norm": _bool(True, "normalise the input of attention and of the feed-forward block"),
    "attention_norm": _bool(True, "pre_norm holds for attention too, not only for the feed-forward block"),
    "norm_gate_rank": _int(0, "rank of a gate behind the pre-norm: its output h becomes h * "
                           "sigmoid(up(silu(down(h)))); 0 = none", 0),
    "post_norm": _choice(("none", "branch", "residual"), "none", "branch: normalise each block's output before it "
                         "is added to the residual stream; residual: normalise the stream after the addition"),
    "attention_post_norm": _bool(True, "post_norm holds for attention too, not only for the feed-forward block"),
    "post_norm_eps": _float(0.0, "epsilon of the post-norms; 0 = norm.eps", 0, 1),
    "post_norm_input": _bool(False, "weights of post-norms multiply the norm's input, not its output"),
    "mix": _choice(("none", "rate", "gate"), "none", "the sum of the residual stream x and a block's output y becomes "
                   "a * x + b * y with stored vectors v: b = |mix_scale * v|, a = 1 - b (rate); b = sigmoid(mix_scale "
                   "* v), a = sqrt(max(1 - b^2, mix_floor)) (gate)"),
    "mix_scale": _float(1.0, "multiplies these vectors"),
    "mix_floor": _float(0.0, "lower limit of a^2", 0, 1),
    "parallel": _bool(False, "parallel residual: attention and feed-forward block read the same input"),
    "residual_scale": _float(1.0, "multiplies each block's output before it is added to the residual stream"),
    "output_scale": _bool("has('layer_scale.weight')", "multiply the layer's output by a stored scalar"),
    "ffn_residual_scale": _float("block_residual_scale", "residual_scale of the feed-forward block"),
    "convolved": _bool("has('attn_branch_conv.weight')", "each block's output y becomes y + a causal depthwise "
                       "convolution of y over conv.taps tokens"),
    "channel_scales": _bool("has('attn_skip_scale.weight')", "before the addition, each channel x of a block's "
                            "output and of the residual stream becomes (x + shift) * scale, both stored"),
    "residual": _choice(("plain", "normed"), "plain", "a block's output is added to the block's input before "
                        "(plain) or after (normed) the pre-norm"),
    "skip_scale": _float(1.0, "multiplies the residual stream before a block's output is added"),
    "ffn_skip_scale": _float("block_skip_scale", "skip_scale of the feed-forward block"),
}

RESIDUAL: dict[str, dict[str, SpecOption]] = {
    "side": {
        "enabled": _bool(False, "before the mixer runs a block (attention, norm, feed-forward) whose weights several "
                         "layers share. It reads the layer's input beside the embeddings, and side_output of its "
                         "result is added to the mixer's input"),
        "owner": _int("layer", "number that replaces {owner} in tensor names: the first layer with the same shared "
                      "matrices", 0),
        "use": _int(0, "number that replaces {use} in tensor names: index of this layer among those with such a "
                    "block", 0),
        "rank": _int(0, "rank of the low-rank matrices that a layer adds to a shared one; 0 = none", 0),
    },
    "per_layer": {
        "width": _int(0, "per-layer embeddings: columns of a further embedding for each layer; 0 = none", 0),
        "scale": _float("sqrt(per_layer_width)", "multiplies the embeddings from the table"),
        "tokens": _bool(True, "add a look-up by token (per_layer_embd); if false, they are only projected from the "
                        "token embedding"),
    },
    "hyper": {
        "streams": _int(0, "hyper-connections: number of residual streams. A block reads a gated sum of them and adds "
                        "its output to each, by gates computed from the streams; 0 = one stream as usual", 0, 64),
        "rank": _int(0, "a block reads the mean of the streams after a norm of each, every column times a gate: "
                     "sigmoid(up(silu(down(streams) / number of streams))), down and up matrices of this rank. Nothing "
                     "else normalises the block's input; 0 = one gate per stream, computed by one matrix", 0),
        "magnitude": _float(1.0, "multiplies a block's output before it is added"),
        "eps": _float(0.0, "added to the gates", 0, 1),
        "write_eps": _float("hyper_eps", "added to the gates that scale a block's output", 0, 1),
        "head": _choice(("gated", "mean"), "gated", "the hidden state behind the last layer: a gated sum of the "
                        "streams, or their mean"),
        "balance": _int(0, "Sinkhorn iterations of the doubly stochastic matrix that mixes the streams: its columns "
                        "and rows are divided by their sums in turn, columns this many times; 0 = no mixing", 0, 1000),
    },
    "ngrams": {
        "size": _int(0, "n-gram embeddings: before this layer, each residual stream gets a value that is computed from "
                     "embeddings of the n-grams that end at the token, for n from 2 to this number; 0 = none", 0, 16),
        "parts": _int(1, "parts of the table for each n; a hash of the n-gram selects a row of each", 1, 256),
        "width": _int("stack_width", "columns of the selected rows side by side"),
        "rows": _int(1, "numbers of rows of the parts, over all such layers: the prime numbers from this one on in "
                     "rising order", 1, 1 << 30),
        "vocabulary": _int(1, "number of token ids, from which the hashes' multipliers are computed"),
        "seed": _int(0, "seed of the hashes' multipliers", 0),
        "separator": _int(0, "token id between texts: n-grams do not reach beyond it", 0),
        "taps": _int(2, "kernel size of the causal convolution of the values; its taps are ngrams.size tokens apart", 2,
                     64),
    },
    "passes": {
        "layers": _int(0, "layers of a pass, with a norm at its end. A pass reads the sum of two streams and replaces "
                       "one of them; the first stream starts as the embeddings and is the result; 0 = no passes", 0),
        "first": _bool(False, "this layer's pass replaces the first stream, not the second"),
        "restart": _bool(False, "before this layer, the residual stream becomes its norm plus the norm of the stream "
                         "before the first such layer"),
    },
    "depth": {
        "layers": _int(0, "attention over depth (attention residuals): layers of a block. The input of attention and "
                       "of the feed-forward block is a sum of the normalised sums of earlier blocks and of the current "
                       "block, weighed by the softmax of their products with a learned query; 0 = a residual stream as "
                       "usual", 0),
        "eps": _float(1e-6, "epsilon of that norm", above=0, most=1),
        "loop_first": _int(0, "first layer of a loop over `loop_layers` layers: each pass begins with the stream and "
                           "the blocks before this layer. From the second pass on, the inputs of query, key, value and "
                           "feed-forward block read a message, a sum over the blocks of the pass before", 0),
        "loop_layers": _int(0, "layers of a pass: whole blocks; 0 = no loop", 0),
        "loop_passes": _int(1, "passes; each run of a layer counts as a layer"),
        "gate_rank": _int(1, "rank of the gates of messages: (1 - tanh(forget(z))) * input + tanh(gain(z)) * message, "
                          "z = down(norm(input), norm(message))"),
    },
    "altup": {
        "streams": _int(0, "alternating updates: number of residual streams. A layer computes one of them, and "
                        "predicts and corrects the others; 0 = one stream as usual", 0, 64),
        "active": _int(0, "index of the stream that layers compute", 0),
        "scale": _bool("has('altup_scale.weight')", "per-layer embeddings read the active stream times a stored "
                       "vector"),
        "laurel_rank": _int(0, "rank of a learned residual beside attention; 0 = none", 0),
    },
}
