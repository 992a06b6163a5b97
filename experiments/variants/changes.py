"""Random changes of a configuration: a change is {key: value}, where LEFT_OUT takes the key away.

Keys of nested objects are joined by a dot. Values are drawn by the name of a key and its current value, so that most
of them are plausible for a model.
"""

import copy
import re

LEFT_OUT = "(left out)"
PARTS = ("text_config", "encoder", "decoder")
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "gelu_fast", "quick_gelu", "tanh",
               "sigmoid", "swish", "gelu_python")
# Of training and of other tasks, or fixed by the words and the weights.
PASSED_OVER = re.compile(
    r"_ids?$|_token|initializer|init_|drop|cache|dtype|architectures|model_type|vocab|version|vision|audio|output_|return_"
    r"|label|problem|torchscript|is_encoder|is_decoder|cross_att|aux|loss|jitter|summary|pretraining|_path|max_length|keep"
    r"|fp32|quantization|chunk_size|use_mamba_kernels|grouped_mm|experts_impl|ep_size|gradient|tf_|altup_coef|transformers"
    r"|rescale|index_n_heads|_index$|mtp|nextn|use_bfloat|per_layer_config|_attn_impl|clipp|task_|add_cross")
WORDS = {
    "feed_forward_proj": ("relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu", "gated-gelu_new"),
    "position_embedding_type": ("rope", "nope", "absolute", "rotary", None), "classifier_pooling": ("cls", "mean"),
    "pos_att_type": ("c2p", "p2c", "p2c|c2p", "c2p|p2c"), "norm_rel_ebd": ("none", "layer_norm"),
    "topk_method": ("greedy", "group_limited_greedy"), "expert_selection_fn": ("softmax", "sigmoid"),
    "scoring_func": ("softmax", "sigmoid"), "encoder_attention_type": ("local", "transient-global"),
    "attention_type": ("original_full", "block_sparse"), "gating": ("per-element", "per-head"),
    "shared_expert_combination_strategy": ("sum", "average"), "qk_norm_type": ("olmo", "qwen3", "per_layer")}
ROTARY = re.compile(r"rope_(theta|scaling|parameters)$|partial_rotary|rope_local_base|rotary_(pct|emb_base)")
LAYER_WORDS = re.compile(r"layer_types$|block_types?$|layers_block_type$")


def part_of(config: dict, random) -> str:
    """The name of the object that has keys of the language model, with a dot; "" is the whole."""
    inside = [name for name in PARTS if isinstance(config.get(name), dict)]
    return random.choice(inside) + "." if inside else ""


def look_up(config: dict, at: str) -> dict:
    for name in at.split(".")[:-1]:
        config = config[name]
    return config


def draw(config: dict, own: dict, random) -> list[dict]:
    """Between one and five changes. own: all keys of the class, with its values."""
    at = part_of(config, random)
    here, known = look_up(config, at), look_up(own, at) if isinstance(own.get(at[:-1]), dict) or not at else {}
    names = sorted(key for key in here.keys() | known.keys() if not PASSED_OVER.search(key))
    plain = [key for key in names if not ROTARY.search(key)]
    found: dict[str, dict] = {}
    for _ in range(random.choice((1, 2, 2, 3, 3, 4, 5))):
        if len(plain) < len(names) and random.random() < 0.3:
            found["rotary"] = {at + key: value for key, value in rotary(here, known, random).items()}
        else:
            key = random.choice(plain)
            if key in ("num_attention_heads", "num_key_value_heads"):
                found["heads"] = {at + name: value for name, value in heads(here, random).items()}
                continue
            if isinstance(here.get(key), dict) and here[key] and random.random() < 0.8:
                inner = random.choice(sorted(here[key]))
                found[f"{key}.{inner}"] = {f"{at}{key}.{inner}": one(inner, here[key][inner], here[key], random)}
                continue
            value = one(key, here.get(key, known.get(key)), here, random)
            if value is not None or random.random() < 0.3:
                found[key] = {at + key: value}
    if "vocab_size" in here and random.random() < 0.1:
        found["vocab_size"] = {at + "vocab_size": random.choice((131, 145, 201, 256))}
    return list(found.values())


def singles(config: dict, own: dict, random) -> list[list[dict]]:
    """For each key of the language model, a change of this key alone. own: as in `draw`."""
    at = part_of(config, random)
    here, known = look_up(config, at), look_up(own, at) if isinstance(own.get(at[:-1]), dict) or not at else {}
    found = []
    for key in sorted(here.keys() | known.keys()):
        if not (PASSED_OVER.search(key) or ROTARY.search(key)):
            old = here.get(key, known.get(key))
            drawn = [value for value in (one(key, old, here, random) for _ in range(9))
                     if value not in (old, LEFT_OUT, None)]
            found += [[{at + key: value}] for value in drawn[:1]]
    return found


def heads(here: dict, random) -> dict:
    """Numbers of heads that go together."""
    queries = random.choice((1, 2, 3, 4, 6, 8))
    keys = random.choice([queries, 1, max(1, queries // 2), max(1, queries // 3), random.choice((None, LEFT_OUT))])
    return {"num_attention_heads": queries} | ({"num_key_value_heads": keys} if "num_key_value_heads" in here else {})


def one(key: str, value, here: dict, random):
    """Another value of a key; None is null."""
    if key in here and random.random() < 0.12:
        return LEFT_OUT
    if random.random() < 0.06:
        return None
    layers = here.get("num_hidden_layers") or 3
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        if key in WORDS:
            return random.choice(WORDS[key])
        if re.search(r"act(_fn)?$|activation", key):
            return random.choice(ACTIVATIONS)
        return "".join(random.choice(value) for _ in range(layers)) if key.endswith("pattern") else None
    if isinstance(value, list):
        return in_list(key, value, layers, random)
    if re.search(r"eps(ilon)?$", key):
        return random.choice((1e-3, 1e-5, 1e-6, 1e-8))
    if isinstance(value, float):
        return random.choice((1.0, 2.0, 0.5, round(value * random.uniform(0.4, 2.5), 4)))
    if "cap" in key:
        return random.choice((None, 3.0, 30.0))
    if re.search("window|attention_chunk", key):
        return random.choice((1, 4, 7, 16, 100))
    if key == "max_position_embeddings":
        return random.choice((128, 500))
    if re.search(r"hidden_size$|d_model|n_embd", key):
        return random.choice((32, 36, 48, 60, 64, 96))
    if re.search(r"intermediate_size|inner|ffn|mlp_dim", key):
        return random.choice((24, 37, 40, 64, 100))
    if re.search("dim|rank|size|width|state", key):
        return random.choice((4, 8, 12, 16, 20, 24, 32, 48))
    if isinstance(value, int):
        least = int("layers" in key and key.startswith("n"))
        return random.choice([n for n in (1, 2, 3, 4, 6, value + 1, 2 * value, 0) if least <= n <= 16] or [value])
    return None


def in_list(key: str, value: list, layers: int, random):
    if LAYER_WORDS.search(key) or (value and all(isinstance(each, str) for each in value)):
        words = sorted(set(value) | ({FULL, SLIDING} if key == "layer_types" and random.random() < 0.3 else set()))
        return [random.choice(words) for _ in range(layers)]
    if len(value) == layers and all(each in (0, 1) for each in value):
        return [random.randrange(2) for _ in value]
    if re.search("layers|indices|idxs", key):
        return sorted(random.sample(range(layers), random.randint(0, layers)))
    if value and all(isinstance(each, (int, float)) for each in value):
        return random.sample(value, len(value))
    return None


def rotary(here: dict, known: dict, random) -> dict:
    """Rotary settings, with keys of old and new configurations, with or without scaling."""
    base = random.choice((100.0, 1e4, 5e5))
    partly = re.search("partial_rotary|rotary_pct", f"{here} {known}")
    share = random.choice((None, None, 0.5, 0.25, 0.75, 1.0) if partly else (None, None, None, 1.0))
    nested = here.get("rope_parameters")
    if isinstance(nested, dict) and any(isinstance(each, dict) for each in nested.values()):
        return {"rope_parameters": {kind: scaled(here, base, random, share) for kind in nested}}
    if not random.randrange(6):
        return {random.choice(["rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"]):
                random.choice((None, LEFT_OUT))}
    if random.random() < 0.5:
        values = scaled(here, base, random, share)
        return {"rope_parameters": values, "rope_theta": LEFT_OUT, "rope_scaling": LEFT_OUT,
                "partial_rotary_factor": random.choice((LEFT_OUT, None, 0.5 if partly else LEFT_OUT))}
    values = {key: value for key, value in scaled(here, base, random, share).items() if key != "rope_theta"}
    if random.random() < 0.5:
        values["type"] = values.pop("rope_type")
    share = values.pop("partial_rotary_factor", LEFT_OUT)
    if values.get("rope_type", values.get("type")) == "default":
        values = random.choice((None, LEFT_OUT, {}, values))
    return {"rope_scaling": values, "rope_theta": base, "rope_parameters": LEFT_OUT, "partial_rotary_factor": share}


def scaled(here: dict, base: float, random, share: float | None) -> dict:
    """One object of rotary settings; optional keys are present half of the time."""
    kind = random.choice(("default", "linear", "dynamic", "yarn", "yarn", "llama3", "longrope"))
    factor, original = random.choice((1.0, 2.0, 4, 8.0)), random.choice((16, 32, 64))
    columns = here.get("qk_rope_head_dim") or here.get("head_dim") or (here.get("hidden_size") or 64) // (
        here.get("num_attention_heads") or 4)
    half = int(columns * (share or 1.0)) // 2
    first = {"rope_type": kind, "rope_theta": base} | ({} if share is None else {"partial_rotary_factor": share})
    maybe: dict = {}
    match kind:
        case "linear" | "dynamic":
            first["factor"] = factor
        case "yarn":
            first |= {"factor": factor, "original_max_position_embeddings": original}
            maybe = {"beta_fast": 8.0, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False,
                     "attention_factor": random.choice((1.3, None))}
        case "llama3":
            first |= {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": random.choice((2.0, 4.0)),
                      "original_max_position_embeddings": original}
        case "longrope":
            first |= {"short_factor": [1 + i / 10 for i in range(half)], "long_factor": [2.0 + i for i in range(half)],
                      "original_max_position_embeddings": original}
            maybe = {"factor": factor, "attention_factor": 1.2}
    return first | {key: value for key, value in maybe.items() if random.random() < 0.4}


def applied(config: dict, changes: list[dict]) -> dict:
    """The configuration with all changes; lists of one value a layer get as many as there are layers then."""
    config = copy.deepcopy(config)
    before = {name: look_up(config, name).get("num_hidden_layers") for name in ("", *(f"{part}." for part in PARTS))
              if not name or isinstance(config.get(name[:-1]), dict)}
    for change in changes:
        for path, value in change.items():
            at, _, key = path.rpartition(".")
            part = look_up(config, at + "." if at else "")
            if value == LEFT_OUT:
                part.pop(key, None)
            else:
                part[key] = value
    for at, layers in before.items():
        part = look_up(config, at)
        now = part.get("num_hidden_layers")
        for key, value in part.items():
            if isinstance(now, int) and isinstance(value, list) and value and len(value) == layers != now:
                part[key] = [value[layer % len(value)] for layer in range(now)]
    return config
