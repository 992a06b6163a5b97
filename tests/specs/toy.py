"""A toy checkpoint for any spec: values of its parameters, and the tensors that building its network reads."""

import numpy as np

from numflow.formats.checkpoint import Checkpoint
from numflow.network.build.stack import decoder_or_encoder, encoder_and_decoder
from numflow.network.steps.builder import Builder
from numflow.network.steps.names import TensorNames
from numflow.spec import Resolved, Spec, load_spec
from tests.specs.case import memory_checkpoint

VOCABULARY = 91
# By the parameter's name, or by section.option where a spec reads the configuration in place.
SIZES = {
    "layers": 2, "encoder_layers": 2, "decoder_layers": 2, "hidden": 64, "heads": 4, "encoder_heads": 4, "kv_heads": 2,
    "stored_kv_heads": 2, "head_dim": 16, "ffn_width": 96, "encoder_ffn": 96, "context": 64, "embedding_width": 48,
    "experts": 4, "experts_per_token": 2, "expert_width": 32, "shared_width": 40, "shared_experts": 1, "window_size": 5,
    "norm_eps": 1e-5, "rope_dim": 8, "nope_dim": 12, "key_dim": 20, "value_dim": 12, "latent.rank": 24,
    "latent.q_rank": 16, "rotary_dims": 8, "first_dense": 1, "blocks": 2, "layer_kinds": ["global", "local"],
    "kinds": ["M", "E"], "side_layers": [0, 1], "side.rank": 8,
    "state_heads": 4, "state_groups": 2, "state_size": 8, "state_head_dim": 16,
    "compressed.out_groups": 2, "compressed.out_rank": 12,
    "recurrent.heads": 4, "recurrent.key_heads": 2, "recurrent.key_dim": 12, "recurrent.value_dim": 12,
    "each": 1, "pairs": 1, "low_rank": 24, "low_rank_q": 16, "idle": 3, "inner": 96, "local_heads": 4, "reach": 3,
    "local_kv_heads": 2, "local_head_dim": 16, "moe.router_width": 12, "unpadded": VOCABULARY,
    "stated": 4, "stated_first": 1, "stated_last": 1, "start": 1, "finish": 3, "turns": 2, "depth.layers": 1,
    **{f"xielu_{name}": [0.4, -0.3] for name in ("positive", "negative", "beta", "eps")},
}

OWN = ("ssm_g_a.weight", "ssm_f_a.weight")  # low-rank factors: specs that name them have no name for the full matrix


def config(spec: Spec, naming: str) -> dict:
    """The values that the spec reads from config.json, GGUF metadata or a llama2.c header, at toy sizes."""
    role = {"hf": "config"}.get(naming, naming)
    sources = {name: value for name, value in spec.section("parameters").items() if isinstance(value, dict)}
    for section, options in spec.table.items():
        if section != "parameters" and isinstance(options, dict):
            sources |= {f"{section}.{key}": value for key, value in options.items() if isinstance(value, dict)}
    found = {}
    for name, source in sources.items():
        keys = source.get(role, [])
        if name in SIZES and keys:
            _put(found, keys if isinstance(keys, str) else keys[0], SIZES[name], nested=naming == "hf")
    return found


def _put(table: dict, key: str, value, nested: bool) -> None:
    *folders, last = key.split(".") if nested else [key]
    for folder in folders:
        table = table.setdefault(folder, {})
    table[last] = value


class _Names(TensorNames):
    """Optional tensors exist if `full`, or if the spec requires them (OWN), and if the spec has a name for them."""

    full = False

    def has(self, name, layer=None, stack=""):
        # A score head would replace the output matrix; tables of expert indices hold integers.
        made = (self.full or name in OWN) and not name.startswith(("score_", "ffn_experts_of"))
        return super().has(name, layer, stack) or (made and self.stored_name(name, layer, stack) is not None)

    def stored_name(self, name, layer=None, stack="", expert=None):
        """The first possible name of a tensor in the file."""
        module, _, role = name.rpartition(".")
        layer = 0 if layer is None else layer
        whole = self.candidates(module, role, layer, stack) if expert is None else iter(())
        return next(whole, None) or next(self.candidates(module, role, layer, stack, expert or 0), None)


class _Builder(Builder):
    """Creates every tensor just before the real builder looks it up."""

    def _invent(self, module, role, shape, group=None):
        name = self.names.stored_name(f"{module}.{role}", self.layer, self.stack, group)
        if name is None:
            return
        known = self.checkpoint.tensors.get(name)
        if known is None or np.prod(known.shape) < np.prod(shape):
            self.checkpoint.tensors[name] = memory_checkpoint({}, {name: tuple(map(int, shape))}).tensors[name]

    def matrix(self, module, rows, columns, select=None, suffix="", normalize_rows=False):
        rows_stored = VOCABULARY if rows is None else rows if select is None else max(select) + 1
        shape = (rows_stored, columns)
        self._invent(module, "weight", shape[::-1] if module in self.transposed else shape)
        return super().matrix(module, rows, columns, select, suffix, normalize_rows)

    def expect_rows(self, module, count, exactly=False):
        """The tensor is created only when its matrix is."""

    def numbers(self, module, count):
        self._invent(module, "weight", (count,))
        return super().numbers(module, count)

    def vector(self, module, role, width=None, rows=None, add=0.0, flat=False, suffix="", written=()):
        if width is not None:
            self._invent(module, role, (width if rows is None else max(rows) + 1,))
        return super().vector(module, role, width, rows, add, flat, suffix)

    def _norm_vector(self, module, role, groups, x, add=0.0):
        whole = any(self.names.candidates(module, role, self.layer, self.stack))
        for group in (None,) if whole else range(groups):
            self._invent(module, role, (x.width // groups,), group)
        return super()._norm_vector(module, role, groups, x, add)

    def stack_of_matrices(self, module, groups, rows, columns, select=None, transpose=False, suffix=""):
        stored = (rows if select is None else max(select) + 1, columns)
        self._invent_stack(module, "weight", groups, stored[::-1] if transpose else stored)
        return super().stack_of_matrices(module, groups, rows, columns, select, transpose, suffix)

    def projected(self, name, roles, shape, groups, eps):
        for module, role, expected in roles.values():
            self._invent(module, role, expected)
        return super().projected(name, roles, shape, groups, eps)

    def stack_of_vectors(self, module, role, groups, rows, select=None, suffix="", add=0.0):
        self._invent_stack(module, role, groups, (rows if select is None else max(select) + 1,))
        return super().stack_of_vectors(module, role, groups, rows, select, suffix, add)

    def _invent_stack(self, module, role, groups, shape):
        """One stacked tensor where the spec has a name for it, else a tensor for each group."""
        if any(self.names.candidates(module, role, self.layer, self.stack)):
            self._invent(module, role, (groups, *shape))
        else:
            for group in range(groups):
                self._invent(module, role, shape, group)


def toy_checkpoint(spec: Spec, naming: str, full: bool) -> Checkpoint:
    """A checkpoint for `spec`. full: with every optional tensor that the spec has a name for."""
    values = config(spec, naming)
    if naming == "gguf":
        architecture = (spec.section("detect").get("gguf") or ["toy"])[0]
        values = {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in values.items()}}
    checkpoint = memory_checkpoint(values, {}, naming)
    names = _Names(spec, checkpoint)
    names.full = full
    builder = _Builder(Resolved(spec, checkpoint.config, naming, names.has), names, checkpoint)
    (encoder_and_decoder if spec.type == "encoder-decoder" else decoder_or_encoder)(builder)
    return checkpoint


def namings(spec: Spec) -> list[str]:
    """Kinds of checkpoints that the spec, or the family it extends, detects; empty for specs with `extends_part`."""
    if spec.section("extends_part"):
        return []
    detect = next(filter(None, (load_spec(path).section("detect") for path in spec.chain)))
    keys = {"hf": "architectures", "gguf": "gguf", "llama2c": "llama2c"}
    return [naming for naming, key in keys.items() if detect.get(key)]


def ids(count: int) -> list[int]:
    return (np.arange(count) * 7 % VOCABULARY).tolist()
