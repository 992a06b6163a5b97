"""Bytes of a text: numflow's memory, and the minimum that the architecture needs; computed without running a model."""

from numflow import network
from numflow.cpu.state.matrix_state import slot_bytes
from numflow.network import describe
from numflow.network.windows import cache_windows

LENGTHS = (4096, 32768)


def table(made) -> list[dict]:
    """Bytes for each model and length, with 16-bit keys and values and float32 states, and the minimum."""
    rows = []
    for one in made:
        checkpoint = one.checkpoint()
        built = network.build(network.choose_spec(checkpoint, None), checkpoint)
        state = sum(slot_bytes(built, "f32").values()) if built.states else 0
        rows += [{"name": one.name, "tokens": tokens, "kept": describe.cache_bytes(built, tokens) + state,
                  "writing": describe.cache_bytes(built, tokens, chunk=1) + state, "least": _least(built, tokens),
                  "expanded": _expanded(one, tokens)} for tokens in LENGTHS]
    return rows


def _least(built, tokens: int) -> int:
    """The minimum: full windows only, the latent or the keys and values once, states without a tail."""
    windows, total = cache_windows(built), describe.state_bytes(built)
    for name, cache in built.caches.items():
        numbers = cache.kv_heads * (cache.k_dim + cache.v_dim)
        total += 2 * numbers * min(tokens, windows[name] or tokens)
    return total


def _expanded(one, tokens: int) -> int:
    """Keys and values of every head, layer and token, as in plain attention."""
    about = {key.partition(".")[2]: value for key, value in one.metadata.items()}
    heads = about["attention.head_count_kv"]
    if "attention.kv_lora_rank" in about:
        each = about["attention.head_count"] * (about["attention.key_length_mla"] + about["attention.value_length_mla"])
    else:
        each = heads * (about["attention.key_length"] + about["attention.value_length"])
    return 2 * each * about["block_count"] * tokens
