"""Tiny GGUF files of architectures that llama.cpp supports: name -> (metadata, tensors, options).

options: "hidden" where the results are hidden states, not logits; "lengths" of the prompts; "tolerance"; "pooled" where
embeddings of whole texts are stored; "flash" where llama.cpp computes the model's attention by FlashAttention only.
"""

VOCABULARY, WIDTH, LAYERS, HEADS, HEAD_DIM, FFN = 67, 64, 3, 4, 16, 72
CASES: dict[str, tuple[dict, dict, dict]] = {}


def case(name: str, architecture: str, keys: dict, tensors: dict, **options) -> None:
    """Add a case; keys are without the architecture, and the COMMON ones are added (None: omit the key)."""
    common = {"context_length": 128, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": FFN,
              "attention.head_count": HEADS}
    metadata = {key if key.startswith("tokenizer.") else f"{architecture}.{key}": value
                for key, value in (common | keys).items() if value is not None}
    CASES[name] = ({"general.architecture": architecture} | metadata, tensors, options)


def table(*further: str) -> dict:
    """Shapes of the embedding table and of vectors outside the layers."""
    return {"token_embd.weight": (VOCABULARY, WIDTH)} | {f"{name}": (WIDTH,) for name in further}


def layers(shapes: dict, which=range(LAYERS)) -> dict:
    """The shapes of one layer, repeated for every layer of `which`."""
    return {f"blk.{layer}.{name}": shape for layer in which for name, shape in shapes.items()}


def attention(kv_heads: int = HEADS, heads: int = HEADS, head_dim: int = HEAD_DIM, bias: bool = False) -> dict:
    """Shapes of the attention projections."""
    rows = {"attn_q": heads * head_dim, "attn_k": kv_heads * head_dim, "attn_v": kv_heads * head_dim}
    shapes: dict = {f"{name}.weight": (count, WIDTH) for name, count in rows.items()}
    shapes["attn_output.weight"] = (WIDTH, heads * head_dim)
    if bias:
        shapes |= {f"{name}.bias": (count,) for name, count in (rows | {"attn_output": WIDTH}).items()}
    return shapes


def ffn(width: int = FFN, gate: bool = True, bias: bool = False) -> dict:
    """Shapes of a feed-forward network."""
    shapes: dict = {"ffn_gate.weight": (width, WIDTH)} if gate else {}
    shapes |= {"ffn_up.weight": (width, WIDTH), "ffn_down.weight": (WIDTH, width)}
    if bias:
        shapes |= {f"{name}.bias": (shape[0],) for name, shape in
                   ((name.removesuffix(".weight"), shape) for name, shape in list(shapes.items()))}
    return shapes


def norms(*names: str, bias: bool = False, width: int = WIDTH) -> dict:
    return {f"{name}.{end}": (width,) for name in names for end in ("weight", *(["bias"] if bias else []))}


def experts(count: int, width: int, gate: bool = True) -> dict:
    """Shapes of routed experts."""
    shapes: dict = {"ffn_gate_inp.weight": (count, WIDTH), "ffn_up_exps.weight": (count, width, WIDTH),
                    "ffn_down_exps.weight": (count, WIDTH, width)}
    return shapes | ({"ffn_gate_exps.weight": (count, width, WIDTH)} if gate else {})


# llama.cpp reads GELU, always of the tanh form, from a table of float16.
GELU = 2e-3

RMS, LAYER = {"attention.layer_norm_rms_epsilon": 1e-6}, {"attention.layer_norm_epsilon": 1e-5}
BERT = {"attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "pooling_type": 1,
        "tokenizer.ggml.token_type_count": 2}
BERT_TABLE = table("token_embd_norm.weight", "token_embd_norm.bias") | {"token_types.weight": (2, WIDTH)}
BERT_NORMS = norms("attn_output_norm", "layer_output_norm", bias=True)
QKV = {"attn_qkv.weight": (3 * WIDTH, WIDTH)}
QKV_BIAS = QKV | {"attn_qkv.bias": (3 * WIDTH,)}
OUT = {"attn_output.weight": (WIDTH, WIDTH)}
HEAD = {"output_norm.weight": (WIDTH,), "output.weight": (VOCABULARY, WIDTH)}

case("nomic_bert", "nomic-bert", BERT | {"rope.freq_base": 1000.0}, BERT_TABLE | layers(QKV | OUT | BERT_NORMS | ffn()),
     hidden=True)
case("nomic_bert_moe", "nomic-bert-moe", BERT | {
    "rope.freq_base": 10000.0, "expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2},
    BERT_TABLE | layers(QKV_BIAS | OUT | {"attn_output.bias": (WIDTH,)} | BERT_NORMS)
    | layers(ffn(gate=False, bias=True), (0, 2)) | layers(experts(4, FFN, gate=False), (1,)), hidden=True,
    tolerance=GELU)
BIASED = attention(bias=True) | BERT_NORMS
UP_BIAS, DOWN_BIAS = {"ffn_up.bias": (FFN,)}, {"ffn_down.bias": (WIDTH,)}
case("jina_bert_v2", "jina-bert-v2", BERT, BERT_TABLE | layers(BIASED | ffn() | DOWN_BIAS), hidden=True, tolerance=GELU)
case("jina_bert_v2_fused", "jina-bert-v2", BERT, BERT_TABLE | layers(
    BIASED | norms("attn_q_norm", "attn_k_norm", "attn_norm_2", bias=True) | ffn(2 * FFN, gate=False)
    | {"ffn_down.weight": (WIDTH, FFN)} | DOWN_BIAS), hidden=True, tolerance=2 * GELU)
case("jina_bert_v3", "jina-bert-v3", BERT | {"rope.freq_base": 20000.0}, BERT_TABLE | layers(
    QKV_BIAS | OUT | {"attn_output.bias": (WIDTH,)} | BERT_NORMS | ffn(gate=False, bias=True)), hidden=True,
    tolerance=GELU)
GEMMA_NORMS = norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | norms(
    "attn_q_norm", "attn_k_norm", width=24)
GEMMA = RMS | {"attention.head_count_kv": 2, "attention.key_length": 24, "attention.value_length": 24,
               "attention.sliding_window": 8, "rope.freq_base": 1e6, "pooling_type": 1, "block_count": 7}
case("gemma_embedding", "gemma-embedding", GEMMA, table("output_norm.weight") | layers(
    attention(2, head_dim=24) | ffn() | GEMMA_NORMS, range(7)), hidden=True, tolerance=GELU)
case("gemma_embedding_dense", "gemma-embedding", GEMMA | {
    "block_count": 6, "dense_2_feat_in": WIDTH, "dense_2_feat_out": 96, "dense_3_feat_in": 96,
    "dense_3_feat_out": WIDTH}, table("output_norm.weight") | layers(
    attention(2, head_dim=24) | ffn() | GEMMA_NORMS, range(6)) | {
        "dense_2.weight": (96, WIDTH), "dense_3.weight": (WIDTH, 96)}, hidden=True, pooled=True, tolerance=GELU)

T5 = {f"enc.blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in (
    {f"attn_{part}.weight": (WIDTH, WIDTH) for part in "qkvo"} | ffn() | norms("attn_norm", "ffn_norm")).items()}
for gated in (True, False):
    case(f"t5_encoder{'_gated' * gated}", "t5encoder", RMS | {
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "attention.relative_buckets_count": 32,
        "attention.layer_norm_epsilon": 1e-6, "attention.causal": False}, table("enc.output_norm.weight")
        | {"enc.blk.0.attn_rel_b.weight": (32, HEADS)}
        | {name: shape for name, shape in T5.items() if gated or "ffn_gate" not in name}, hidden=True,
        **({"tolerance": 2 * GELU} if gated else {}))
# UMT5 has buckets in each layer.
CASES["umt5_encoder"] = (CASES["t5_encoder"][0], CASES["t5_encoder"][1] | {
    f"enc.blk.{layer}.attn_rel_b.weight": (32, HEADS) for layer in range(LAYERS)}, CASES["t5_encoder"][2])

# Which of two kinds of positions a file has is told by its number of layers, 32 or 40.
LLAMA_NORMS = norms("attn_norm", "ffn_norm")
SMALL = {f"{name}.weight": (16, 16) for name in ("attn_q", "attn_k", "attn_v", "attn_output")} | {
    "ffn_gate.weight": (20, 16), "ffn_up.weight": (20, 16), "ffn_down.weight": (16, 20)} | norms(
    "attn_norm", "ffn_norm", width=16)
SMALL_TABLE = {"token_embd.weight": (VOCABULARY, 16), "output_norm.weight": (16,), "output.weight": (VOCABULARY, 16)}
for count in (32, 40):
    case(f"baichuan_{count}", "baichuan", RMS | {
        "block_count": count, "embedding_length": 16, "feed_forward_length": 20, "attention.head_count": 2,
        "attention.head_count_kv": 2, "rope.dimension_count": 8}, SMALL_TABLE | layers(SMALL, range(count)))
case("qwen", "qwen", RMS | {"rope.freq_base": 10000.0, "rope.dimension_count": HEAD_DIM,
                            "feed_forward_length": 2 * FFN},
     table() | HEAD | layers(QKV_BIAS | OUT | ffn() | LLAMA_NORMS))
SHARED = {"ffn_gate_shexp.weight": (40, WIDTH), "ffn_up_shexp.weight": (40, WIDTH),
          "ffn_down_shexp.weight": (WIDTH, 40)}
ROUTED = RMS | {"attention.head_count_kv": 2, "expert_count": 5, "expert_used_count": 2,
                "expert_feed_forward_length": 20, "expert_weights_norm": True, "rope.dimension_count": HEAD_DIM}
case("bailing_moe", "bailingmoe", ROUTED | {"expert_shared_count": 2, "expert_weights_scale": 1.0,
                                            "leading_dense_block_count": 0},
     table() | HEAD | layers(attention(2) | experts(5, 20) | SHARED | LLAMA_NORMS))
GROUPED = {"attn_qkv.weight": (WIDTH + 4 * HEAD_DIM, WIDTH), "exp_probs_b.bias": (6,)} | OUT | norms(
    "attn_q_norm", "attn_k_norm", width=HEAD_DIM)
case("bailing_moe_v2", "bailingmoe2", ROUTED | {
    "expert_count": 6, "expert_group_count": 3, "expert_group_used_count": 2, "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 40, "expert_weights_scale": 2.5, "expert_gating_func": 2,
    "leading_dense_block_count": 1, "rope.dimension_count": HEAD_DIM // 2},
    table() | HEAD | layers(GROUPED | LLAMA_NORMS) | layers(experts(6, 20) | SHARED, (1, 2)) | layers(ffn(), (0,)))
del CASES["bailing_moe_v2"][1]["blk.0.exp_probs_b.bias"]
case("deci", "deci", RMS | {
    "block_count": 5, "attention.head_count": [4, 4, 0, 0, 4], "attention.head_count_kv": [2, 0, 0, 0, 4],
    "feed_forward_length": [72, 40, 56, 0, 24], "attention.key_length": 16, "attention.value_length": 16,
    "rope.dimension_count": 16, "rope.freq_base": 500000.0},
    table() | HEAD | {"rope_freqs.weight": (8,)} | layers(norms("attn_norm") | OUT, (0, 1, 4))
    | layers(norms("ffn_norm"), (0, 1, 2, 4)) | layers(attention(2), (0,)) | layers(attention(4), (4,))
    | {name: shape for layer, width in ((0, 72), (1, 40), (2, 56), (4, 24))
       for name, shape in layers(ffn(width), (layer,)).items()})
del CASES["deci"][1]["rope_freqs.weight"]
case("openelm", "openelm", RMS | {
    "attention.head_count": [2, 4, 6], "attention.head_count_kv": [1, 2, 3], "feed_forward_length": [24, 48, 72],
    "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "rope.dimension_count": HEAD_DIM},
    table("output_norm.weight") | layers(LLAMA_NORMS | norms("attn_q_norm", "attn_k_norm", width=HEAD_DIM))
    | {name: shape for layer, n in enumerate((1, 2, 3)) for name, shape in layers(ffn(24 * n) | {
        "attn_qkv.weight": (4 * n * HEAD_DIM, WIDTH),
        "attn_output.weight": (WIDTH, 2 * n * HEAD_DIM)}, (layer,)).items()})
case("refact", "refact", RMS | {"attention.head_count_kv": 1},
     table() | HEAD | layers(attention(1) | ffn() | LLAMA_NORMS))
LAYER_HEAD = HEAD | {"output_norm.bias": (WIDTH,)}
LAYER_NORMS = norms("attn_norm", "ffn_norm", bias=True)
case("codeshell", "codeshell", LAYER | {
    "attention.head_count_kv": 2, "rope.freq_base": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    table() | LAYER_HEAD | layers(attention(2, bias=True) | ffn(gate=False, bias=True) | LAYER_NORMS), tolerance=GELU)
case("jais", "jais", LAYER | {"attention.max_alibi_bias": 6.0}, table() | LAYER_HEAD | layers(
    QKV_BIAS | OUT | {"attn_output.bias": (WIDTH,)} | ffn(bias=True) | LAYER_NORMS))
case("plamo", "plamo", RMS | {"attention.head_count_kv": 2},
     table() | HEAD | layers(attention(2) | ffn() | norms("attn_norm")))
case("plm", "plm", RMS | {"attention.kv_lora_rank": 24, "attention.key_length": 20, "attention.value_length": 14,
                          "rope.dimension_count": 8},
     table("output_norm.weight") | layers(ffn(gate=False) | LLAMA_NORMS | norms("attn_kv_a_norm", width=24) | {
         "attn_q.weight": (80, WIDTH), "attn_kv_a_mqa.weight": (32, WIDTH), "attn_kv_b.weight": (104, 24),
         "attn_output.weight": (WIDTH, 56)}))
case("pangu_embedded", "pangu-embedded", RMS | {"attention.head_count_kv": 2, "rope.dimension_count": HEAD_DIM},
     table() | HEAD | layers(attention(2, bias=True) | ffn() | LLAMA_NORMS))
case("maincoder", "maincoder", RMS | {"attention.head_count_kv": 2, "rope.dimension_count": HEAD_DIM},
     table("output_norm.weight") | layers(attention(2) | ffn() | LLAMA_NORMS | norms(
         "attn_q_norm", "attn_k_norm", width=HEAD_DIM)))
case("llama_embed", "llama-embed", RMS | {"attention.head_count_kv": 2, "rope.dimension_count": HEAD_DIM,
                                          "attention.causal": False, "pooling_type": 1},
     table() | HEAD | layers(attention(2) | ffn() | LLAMA_NORMS), hidden=True)
HEAD_NORMS = norms("attn_q_norm", "attn_k_norm", width=HEAD_DIM)
POST_NORMS = {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
FUSED = {"ffn_up.weight": (2 * FFN, WIDTH), "ffn_down.weight": (WIDTH, FFN), "attn_output.weight": (WIDTH, WIDTH),
         "attn_qkv.weight": (WIDTH + 4 * HEAD_DIM, WIDTH)}
case("plamo3", "plamo3", RMS | {"attention.head_count_kv": 2, "attention.sliding_window": 6, "rope.freq_base": 1e6,
                                "attention.sliding_window_pattern": 2, "attention.key_length": HEAD_DIM,
                                "attention.value_length": HEAD_DIM},
     table() | HEAD | layers(FUSED | LLAMA_NORMS | HEAD_NORMS | POST_NORMS))
for window in (0, 6):
    case(f"smallthinker{'_window' * (window > 0)}", "smallthinker", RMS | {
        "block_count": 5, "attention.head_count_kv": 2, "expert_count": 5, "expert_used_count": 2,
        "expert_feed_forward_length": 20, "expert_gating_func": 2, "attention.sliding_window": window or None,
        "rope.dimension_count": HEAD_DIM},
        table() | HEAD | layers(attention(2) | experts(5, 20) | LLAMA_NORMS, range(5)))
SCAN = {"ssm_in.weight": (96, WIDTH), "ssm_conv1d.weight": (48, 4), "ssm_x.weight": (96, 48), "ssm_dt.weight": (3, 64),
        "ssm_dt.bias": (3,), "ssm_a": (3,), "ssm_d": (3,), "ssm_out.weight": (WIDTH, 48), "ssm_dt_norm": (64,),
        "ssm_b_norm": (16,), "ssm_c_norm": (16,)}
PLAMO2_FFN = {name: shape for name, shape in FUSED.items() if name.startswith("ffn")}
# With a recurrent layer first, as in published files, llama.cpp never returns.
case("plamo2", "plamo2", RMS | {
    "attention.head_count": [4, 0, 0], "attention.head_count_kv": [2, 0, 0], "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM, "ssm.conv_kernel": 4, "ssm.inner_size": 48, "ssm.state_size": 16,
    "ssm.time_step_rank": 3, "ssm.group_count": 0, "rope.freq_base": 10000.0},
    table() | HEAD | layers(LLAMA_NORMS | POST_NORMS | PLAMO2_FFN) | layers(SCAN, (1, 2)) | layers(
        {name: shape for name, shape in FUSED.items() if name.startswith("attn")}
        | {"attn_q_norm.weight": (HEADS, HEAD_DIM), "attn_k_norm.weight": (2, HEAD_DIM)}, (0,)))
case("grok", "grok", RMS | {"attention.head_count_kv": 2, "expert_count": 5, "expert_used_count": 2,
                            "attn_logit_softcapping": 2.0, "attention.output_scale": 0.3, "embedding_scale": 8.0,
                            "logit_scale": 0.6, "final_logit_softcapping": 1.5, "rope.dimension_count": HEAD_DIM},
     table() | HEAD | layers(attention(2) | experts(5, FFN) | norms(
         "attn_norm", "ffn_norm", "attn_output_norm", "layer_output_norm")), tolerance=GELU)
case("dbrx", "dbrx", {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 1.5, "attention.head_count_kv": 2,
                      "expert_count": 5, "expert_used_count": 2, "rope.freq_base": 5000.0},
     table("output_norm.weight") | HEAD | layers({
         "attn_qkv.weight": (WIDTH + 4 * HEAD_DIM, WIDTH), "attn_output.weight": (WIDTH, WIDTH)}
         | norms("attn_norm", "attn_output_norm") | experts(5, FFN)))
case("neo_bert", "neo-bert", RMS | {"attention.causal": False, "rope.freq_base": 10000.0, "pooling_type": 0},
     table("enc.output_norm.weight") | layers(QKV | {
         "attn_output.weight": (WIDTH, WIDTH), "ffn_up.weight": (2 * FFN, WIDTH), "ffn_down.weight": (WIDTH, FFN)}
         | norms("attn_norm", "ffn_norm")), hidden=True)
case("eurobert", "eurobert", RMS | {"attention.head_count_kv": 2, "rope.freq_base": 250000.0, "pooling_type": 1},
     table("output_norm.weight") | layers(attention(2) | ffn() | norms("attn_norm", "ffn_norm")), hidden=True)
TURNED = {"attention.head_count_kv": 2, "rope.dimension_sections": [4, 2, 2, 0], "rope.freq_base": 5000.0}
case("paddleocr", "paddleocr", RMS | TURNED, table() | HEAD | layers(attention(2) | ffn() | LLAMA_NORMS))
case("hunyuan_vl", "hunyuan_vl", RMS | TURNED | {"rope.scaling.alpha": 50.0},
     table() | HEAD | layers(attention(2) | ffn() | LLAMA_NORMS | HEAD_NORMS))
SHARED = {f"ffn_{part}_shexp.weight": shape for part, shape in (("gate", (20, WIDTH)), ("up", (20, WIDTH)),
                                                               ("down", (WIDTH, 20)))}
case("hy_v3", "hy_v3", RMS | {
    "attention.head_count_kv": 2, "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 20,
    "expert_shared_feed_forward_length": 20, "expert_weights_scale": 2.5, "expert_weights_norm": True,
    "expert_gating_func": 2, "rope.freq_base": 5000.0, "leading_dense_block_count": 1},
    table() | HEAD | layers(attention(2) | LLAMA_NORMS | HEAD_NORMS) | layers(ffn(), (0,)) | layers(
        experts(5, 20) | SHARED | {"exp_probs_b": (5,)}, (1, 2)))

# Attention in both directions, of models that fill in masks.
BOTH_WAYS = {"attention.head_count_kv": 2, "rope.dimension_count": HEAD_DIM, "attention.causal": False}
case("llada", "llada", RMS | BOTH_WAYS, table() | HEAD | layers(attention(2) | ffn() | LLAMA_NORMS))
case("dream", "dream", RMS | BOTH_WAYS, table() | HEAD | layers(attention(2) | ffn() | LLAMA_NORMS | {
    "attn_q.bias": (WIDTH,), "attn_k.bias": (2 * HEAD_DIM,), "attn_v.bias": (2 * HEAD_DIM,)}))
for name in ("llada-moe", "rnd1"):
    case(name.replace("-", "_"), name, RMS | BOTH_WAYS | {
        "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 20},
        table() | HEAD | layers(attention(2) | experts(5, 20) | LLAMA_NORMS | HEAD_NORMS))
# Layers that run twice, with a norm between.
for skipped in (False, True):
    case(f"nanbeige{'_unnormed' * skipped}", "nanbeige", RMS | {
        "attention.head_count_kv": 2, "rope.dimension_count": HEAD_DIM, "num_loops": 2,
        "skip_loop_final_norm": skipped},
        table() | HEAD | layers(attention(2) | ffn() | LLAMA_NORMS))
WINDOWED = RMS | {"attention.head_count_kv": 2, "attention.sliding_window": 6, "rope.freq_base": 5000.0,
                  "rope.freq_base_swa": 100.0, "attention.sliding_window_pattern": [True, False, True],
                  "rope.dimension_count": HEAD_DIM}
case("spark2_5", "spark2_5", WINDOWED | {"rope.dimension_count": 8, "rope.dimension_count_swa": HEAD_DIM},
     table() | HEAD | layers({"attn_qkv.weight": (WIDTH + 4 * HEAD_DIM, WIDTH), "attn_gate.weight": (HEADS, WIDTH)}
                             | OUT | ffn() | LLAMA_NORMS), tolerance=GELU)
case("maple", "maple", WINDOWED | {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 20,
                                   "swiglu_clamp_exp": [0.5, 0.25, 0.5]},
     table() | HEAD | layers(attention(2) | experts(5, 20) | LLAMA_NORMS | HEAD_NORMS))

# Ranks, and queries that grow with the position.
case("mistral4", "mistral4", RMS | {
    "attention.head_count_kv": 1, "attention.q_lora_rank": 28, "attention.kv_lora_rank": 24, "attention.key_length": 32,
    "attention.value_length": 24, "attention.key_length_mla": 20, "attention.value_length_mla": 14,
    "rope.dimension_count": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.1, "expert_count": 5,
    "expert_used_count": 2, "expert_feed_forward_length": 20, "expert_shared_count": 1, "expert_weights_scale": 1.5,
    "expert_weights_norm": True, "leading_dense_block_count": 1, "attention.temperature_scale": 0.2,
    "attention.temperature_length": 8},
    table() | HEAD | layers(LLAMA_NORMS | norms("attn_kv_a_norm", width=24) | norms("attn_q_a_norm", width=28) | {
        "attn_q_a.weight": (28, WIDTH), "attn_q_b.weight": (80, 28), "attn_kv_a_mqa.weight": (32, WIDTH),
        "attn_k_b.weight": (4, 24, 12), "attn_v_b.weight": (4, 14, 24), "attn_output.weight": (WIDTH, 56)})
    | layers(ffn(), (0,)) | layers({"ffn_gate_inp.weight": (5, WIDTH), "ffn_gate_up_exps.weight": (5, 40, WIDTH),
                                    "ffn_down_exps.weight": (5, WIDTH, 20)} | SHARED, (1, 2)))
# Heads, windows, rotation, experts and cuts of each layer.
PATTERN = WINDOWED | {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 20,
                      "leading_dense_block_count": 1, "attention.value_length": HEAD_DIM,
                      "attention.key_length": HEAD_DIM}
STEP = {name: shape for layer, heads in enumerate((6, 4, 6)) for name, shape in layers(
    attention(2, heads) | {"attn_gate.weight": (heads, WIDTH)}, (layer,)).items()}
case("step35", "step35", PATTERN | {
    "attention.head_count": [6, 4, 6], "attention.head_count_kv": [2, 2, 2], "rope.dimension_count": HEAD_DIM,
    "expert_shared_feed_forward_length": 20, "expert_weights_scale": 1.7, "expert_weights_norm": True,
    "expert_gating_func": 2, "swiglu_clamp_exp": [0.0, 0.4, 0.0], "swiglu_clamp_shexp": [0.0, 0.0, 0.5]},
    table() | HEAD | STEP | layers(LLAMA_NORMS | HEAD_NORMS) | layers(ffn(), (0,))
    | layers(experts(5, 20) | SHARED | {"exp_probs_b.bias": (5,)}, (1, 2)))
case("mimo2", "mimo2", PATTERN | {
    "attention.head_count_kv": [4, 2, 4], "attention.key_length": 24, "rope.dimension_count": 8,
    "attention.value_scale": 0.7, "expert_gating_func": 2},
    table() | HEAD | layers(LLAMA_NORMS) | layers(ffn(), (0,))
    | layers(experts(5, 20) | {"exp_probs_b.bias": (5,)}, (1, 2))
    | {name: shape for layer, count in enumerate((4, 2, 4)) for name, shape in layers({
        "attn_qkv.weight": (96 + 40 * count, WIDTH), "attn_output.weight": (WIDTH, WIDTH)}
        | ({"attn_sinks.weight": (HEADS,)} if layer != 1 else {}), (layer,)).items()})
# Blocks of keys that an index chooses from: no more than it chooses, and more.
M3 = RMS | {
    "attention.head_count_kv": 2, "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 20,
    "expert_shared_count": 1, "expert_weights_scale": 1.7, "expert_weights_norm": True, "expert_gating_func": 2,
    "leading_dense_block_count": 1, "rope.dimension_count": 8, "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM, "rope.freq_base": 5000.0, "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 8, "attention.indexer.top_k": 16, "attention.indexer.block_size": 8,
    "attention.indexer.local_blocks": 1}
M3_TENSORS = table() | HEAD | layers(attention(2) | LLAMA_NORMS | HEAD_NORMS) | layers(ffn(), (0,)) | layers(
    experts(5, 20) | SHARED | {"exp_probs_b.bias": (5,), "indexer.q_proj.weight": (16, WIDTH),
                               "indexer.k_proj.weight": (8, WIDTH)}
    | norms("indexer.q_norm", "indexer.k_norm", width=8), (1, 2))
case("minimax_m3", "minimax-m3", M3, M3_TENSORS)
case("minimax_m3_blocks", "minimax-m3", M3 | {
    "context_length": 128, "attention.indexer.top_k": 2, "attention.indexer.block_size": 4}, M3_TENSORS,
     lengths=(9, 70), flash=True, tolerance=1e-2)
# Gates of heads and of columns; every fourth layer sees everything, from the first on, and is stretched.
LAGUNA = PATTERN | {"attention.sliding_window_pattern": None, "expert_shared_feed_forward_length": 20,
                    "expert_weights_scale": 1.7, "expert_weights_norm": True, "expert_gating_func": 2,
                    "rope.dimension_count": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                    "rope.scaling.original_context_length": 16}
GATED = experts(5, 20) | SHARED | {"exp_probs_b.bias": (5,)}
case("laguna", "laguna", LAGUNA | {"block_count": 5, "attention.head_count": [6, 4, 2, 4, 6],
                                   "rope.dimension_count_swa": HEAD_DIM},
     table() | HEAD | layers(LLAMA_NORMS | HEAD_NORMS, range(5)) | layers(ffn(), (0,)) | layers(GATED, range(1, 5))
     | {name: shape for layer, heads in enumerate((6, 4, 2, 4, 6)) for name, shape in layers(
         attention(2, heads) | {"attn_gate.weight": (heads, WIDTH)}, (layer,)).items()})
case("laguna_by_column", "laguna", LAGUNA | {"attention.sliding_window": None},
     table() | HEAD | layers(attention(2) | LLAMA_NORMS | HEAD_NORMS | {"attn_gate.weight": (WIDTH, WIDTH)})
     | layers(ffn(), (0,)) | layers(GATED, (1, 2)))
# Matrices of their own for images, which text does not meet.
case("cogvlm", "cogvlm", RMS | {"attention.head_count_kv": HEADS, "rope.freq_base": 10000.0},
     table() | HEAD | layers(QKV | OUT | ffn() | LLAMA_NORMS | {
         "vis_attn_qkv.weight": (3 * WIDTH, WIDTH), "vis_attn_output.weight": (WIDTH, WIDTH),
         "vis_gate.weight": (FFN, WIDTH), "vis_up.weight": (FFN, WIDTH), "vis_down.weight": (WIDTH, FFN)}))
case("arctic", "arctic", RMS | {"attention.head_count_kv": 2, "expert_count": 5, "expert_used_count": 2,
                                "feed_forward_length": 40, "rope.dimension_count": HEAD_DIM},
     table() | HEAD | layers(attention(2) | ffn(WIDTH) | experts(5, 40) | LLAMA_NORMS | norms("ffn_norm_exps")))
