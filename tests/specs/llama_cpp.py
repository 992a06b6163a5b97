"""Results of llama.cpp for a GGUF file, by its C interface (include/llama.h of b11434)."""

import ctypes
from ctypes import POINTER, c_bool, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path

import numpy as np

_F32, _NO_POOLING = 0, 0


class ModelParams(ctypes.Structure):
    """struct llama_model_params."""

    _fields_ = [("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32),
                ("split_mode", c_int32), ("load_mode", c_int32), ("lazy_mode", c_int32), ("main_gpu", c_int32),
                ("tensor_split", c_void_p), ("progress_callback", c_void_p), ("progress_data", c_void_p),
                ("kv_overrides", c_void_p), *((name, c_bool) for name in (
                    "vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc", "load_mtp"))]


class ContextParams(ctypes.Structure):
    """struct llama_context_params."""

    _fields_ = [*((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq",
                                                "n_outputs_max", "n_outputs_max_per_seq")),
                *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type",
                                               "pooling_type", "attention_type", "flash_attn_type")),
                *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor",
                                               "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
                ("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float), ("cb_eval", c_void_p),
                ("cb_eval_user_data", c_void_p), ("type_k", c_int32), ("type_v", c_int32),
                ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), *((name, c_bool) for name in (
                    "embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
                ("samplers", c_void_p), ("n_samplers", c_size_t), ("ctx_other", c_void_p)]


class Tokens(ctypes.Structure):
    """struct llama_batch."""

    _fields_ = [("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)),
                ("pos", POINTER(c_int32)), ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))),
                ("logits", POINTER(c_int8))]


def opened(folder: Path) -> ctypes.CDLL:
    """libllama.so of a folder, with the argument types of the functions used here."""
    library = ctypes.CDLL(str(folder / "libllama.so"))
    library.llama_model_default_params.restype = ModelParams
    library.llama_context_default_params.restype = ContextParams
    for name, given, result in (
            ("model_load_from_file", [ctypes.c_char_p, ModelParams], c_void_p),
            ("init_from_model", [c_void_p, ContextParams], c_void_p), ("batch_init", [c_int32] * 3, Tokens),
            ("batch_free", [Tokens], None), ("decode", [c_void_p, Tokens], c_int32),
            ("get_logits_ith", [c_void_p, c_int32], POINTER(c_float)),
            ("get_embeddings_ith", [c_void_p, c_int32], POINTER(c_float)),
            ("get_embeddings_seq", [c_void_p, c_int32], POINTER(c_float)), ("free", [c_void_p], None),
            ("model_free", [c_void_p], None)):
        function = getattr(library, f"llama_{name}")
        function.argtypes, function.restype = given, result
    library.llama_backend_init()
    return library


def numbers(library: ctypes.CDLL, path: Path, ids: list[int], width: int, hidden: bool,
            pooled: bool = False, flash: bool = False) -> np.ndarray:
    """float32 [len(ids), width]: logits after every token, or hidden states, with float32 keys and values.

    pooled: one row [1, width], the embedding of the whole text with the file's pooling. flash: FlashAttention, whose
    masks are float16.

    Raises:
        RuntimeError: llama.cpp does not load or run the file; it prints the reason.
    """
    params = library.llama_model_default_params()
    params.use_extra_bufts = False
    model = library.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError(f"{path}: not loaded")
    settings = library.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = _F32
    settings.flash_attn_type, settings.embeddings = int(flash), hidden
    if not pooled:
        settings.pooling_type = _NO_POOLING
    context = library.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError(f"{path}: no context")
    batch = library.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if library.llama_decode(context, batch):
        raise RuntimeError(f"{path}: not run")
    row = (library.llama_get_embeddings_seq if pooled else library.llama_get_embeddings_ith if hidden
           else library.llama_get_logits_ith)
    found = np.array([np.ctypeslib.as_array(row(context, i), (width,)).copy()
                      for i in range(1 if pooled else len(ids))])
    library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(model)
    return found
