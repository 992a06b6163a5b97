"""From a name or path to a Model: checkpoint, spec, network, plan, executor."""

import inspect
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from numflow import formats, network, registry
from numflow.engine.model import Model
from numflow.engine.request.ahead import check_draft
from numflow.engine.request.defaults import read_defaults
from numflow.engine.request.facts import ModelFacts
from numflow.engine.request.prompt import Prompts
from numflow.engine.runner.kv_memory import plan_memory
from numflow.engine.tasks.embedding_recipe import EmbeddingRecipe
from numflow.errors import DeviceError, FormatError, RequestError, did_you_mean, quoted
from numflow.formats.mapped import release_memory
from numflow.machine import free_memory
from numflow.ops import Network
from numflow.partition.cut.plan import single_device
from numflow.registry.progress import reporter

# Executors by name; a module is imported only when its executor is chosen.
BACKENDS = {"reference": "numflow.reference.program", "cpu": "numflow.cpu.program", "cuda": "numflow.cuda.program"}
ACTIVATIONS = ("int8", "int16", "f32")
OF_HOST = ("reference", "cpu")  # backends whose keys and values are in this machine's own memory
OF_GPUS = ("host_embeddings", "host_kv_percent", "collectives")
Before = Callable[[Network, Prompts, Callable[[], EmbeddingRecipe]], None]


def load(path_or_name: str | Path, backend: str = "cpu", spec: str | Path | None = None, activations: str = "int8",
         threads: int | None = None, *, offline: bool = False, progress: bool = True,
         context: int | None = None, chunk: int = 512, weights: str | Path | None = None,
         imatrix: str | Path | None = None, kv: str | None = None, kv_k: str | None = None, kv_v: str | None = None,
         devices: str | None = None, transport: str = "threads", cpu_layers: int = 0,
         draft: "str | Path | Model | None" = None, before: "Before | None" = None,
         **options) -> Model:
    """Load a model, ready to run.

    path_or_name: a weight file, a model folder, a known model's name, or an id of a model hub.
    backend:      "cpu" (compiled kernels), "cuda" (an NVIDIA GPU) or "reference" (NumPy, slow, always float32).
    spec:         a specification file or name; None: detected from the checkpoint.
    activations:  "int8" (fast: quantised weights times int8 activations), "int16" (two int8 for each number, some 200
                  times closer; on the CPU) or "f32". Checkpoints of float weights compute in float32 in any case.
    threads:      None: one per physical core.
    offline:      never touch the network. progress: show on standard error how downloading and quantising go.
    context:      longest text in tokens, at most the model's own, unless its positions stretch as a text needs it
                  (dynamic scaling). chunk: rows of a prompt that run at once.
    weights:      quantise matrices now: a scheme ("q3h"), a preset ("q4-mix") or a recipe file; None: as stored. The
                  next start finds them quantised (network/quantise/kept.py).
    imatrix:      with `weights`: a calibration file that says which columns matter (`numflow imatrix`).
    kv:           type of cached keys and values: f32, f16, q8, q6, q5, q4, q3h, q3 or q2; None: f16, or f32 where the
                  arithmetic is float32. kv_k, kv_v: of keys, of values alone.
    devices:      place the model on several devices: "0;1" cuts it by layer, "0&1" by tensor, "0&1;2&3" both. On the
                  CPU a device is a set of threads with memory of its own; `threads` are then those of each device.
                  With "cuda" numbers are GPUs, and "cpu" among them is the processor: "cpu;0".
    transport:    of devices: "threads" of this process; on the CPU also "processes" with shared memory between; "ray":
                  an actor of a Ray cluster for each group of devices.
    cpu_layers:   with "cuda": so many layers run on the processor, the first ones; -N: the last N.
    draft:        a smaller model of the same vocabulary that guesses tokens (speculative decoding); a name or path is
                  loaded with the same backend, activations and threads, and closed with the model.
    before:       called with the network, what reads prompts, and a function that reads how embeddings are made, before
                  weights are read and kernels compiled: what it raises ends the loading.
    options:      further options of the executor.

    Raises:
        ModelNotFoundError, DownloadError, FormatError, SpecError, NetworkError: the model cannot be had or read.
        DeviceError: no such backend, or what it needs is missing.
        RequestError: an option that does not exist, or is out of range.
    """
    begin, free = time.perf_counter(), free_memory()
    program_class, types = _executor(backend), {"kv_k": kv_k or kv, "kv_v": kv_v or kv}
    options |= {name: str(kind).lower() for name, kind in types.items() if kind is not None}
    options = _options(program_class, backend, {"activations": activations, "threads": threads, **options})
    if cpu_layers and backend != "cuda":
        raise RequestError(f"cpu_layers={cpu_layers} leaves layers of a GPU's model to the processor: it needs backend "
                           f"'cuda' (--device cuda); backend {backend!r} runs all layers itself")
    several = devices is not None or cpu_layers != 0
    if not several and transport != "threads":
        raise RequestError(f"transport {transport!r} is between devices: name them with devices (--devices '0;1')")
    place = registry.resolve(path_or_name, offline=offline, progress=progress)
    checkpoint = formats.open_checkpoint(place)
    chosen = network.choose_spec(checkpoint, spec)
    if imatrix is not None and weights is None:
        raise RequestError("imatrix helps quantising: say with weights what to quantise to")
    tokenizer, defaults = _tokenizer_of(checkpoint, chosen), chosen.section("generation")
    texts, headers = (defaults.get("template", ""), defaults.get("system_prompt", "")), None
    if before is not None or _is_named(draft):
        headers = _limited(network.build(chosen, checkpoint, fuse=not several), context)
        if before is not None:
            before(headers, Prompts(tokenizer, *texts), lambda: _recipe(checkpoint, chosen))
        if _is_named(draft):
            check_draft(ModelFacts.of(headers), draft, offline, progress)
    with closing(reporter(progress and weights is not None)) as told:
        if weights is not None:
            from numflow.engine.requantise import requantised

            checkpoint, headers = requantised(checkpoint, chosen, weights, imatrix, threads, told), None
        built = headers or _limited(network.build(chosen, checkpoint, fuse=not several), context)
        if not several:
            program = program_class(single_device(built, backend).part(0), network.WeightSource(built, checkpoint),
                                    **options)
        else:
            from numflow.engine.placed import FileWeights, placed_program

            program = placed_program(built, backend, BACKENDS, devices, checkpoint,
                                     FileWeights(checkpoint.path, chosen, weights, imatrix), transport,
                                     cpu_layers=cpu_layers, options=options)
    model = Model(built, program, lambda: _vocabulary_released(tokenizer(), checkpoint), _ends(checkpoint),
                  _begin(checkpoint), *texts, chunk,
                  lambda: _recipe(checkpoint, chosen), lambda: read_defaults(checkpoint),
                  lambda: registry.sampling(path_or_name, place))
    model.bits_per_weight = network.bits_per_weight(built, checkpoint)
    if draft is not None:
        _add_draft(model, draft, lambda: load(draft, backend, None, activations, threads, offline=offline,
                                              progress=progress))
    release_memory()
    model.core.plan(plan_memory(program, free if backend in OF_HOST and transport != "ray" else None, model.runner))
    model.load_s = time.perf_counter() - begin
    return model


def _add_draft(model: Model, draft, load_it) -> None:
    """Let a model, or one that is loaded for it, guess for `model`; nothing stays open if it cannot."""
    model.owns_draft = not isinstance(draft, Model)
    found = None
    try:
        found = load_it() if model.owns_draft else draft
        model.draft = found
    except BaseException:
        if model.owns_draft and found is not None:
            found.close()
        model.close()
        raise


def _executor(backend: str):
    if backend not in BACKENDS:
        raise DeviceError(f"no backend {backend!r}{did_you_mean(backend, BACKENDS)}")
    return import_module(BACKENDS[backend]).Program


def _options(program_class, backend, options):
    """The options, checked against what the executor takes."""
    if options["activations"] not in ACTIVATIONS:
        raise RequestError(f"activations should be one of {', '.join(ACTIVATIONS)}, is {options['activations']!r}")
    threads = options["threads"]
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise RequestError(f"threads should be a whole number from 1, is {threads!r}")
    ours = ("network", "weights", "world", "device")
    known = [name for name in inspect.signature(program_class).parameters if name not in ours]
    for name in options:
        if name in OF_GPUS and name not in known:
            raise RequestError(f"{name}={options[name]!r} is for GPUs (--device cuda); backend {backend!r} has no such "
                               "option")
        if name not in known:
            raise RequestError(f"backend {backend!r} has no option {name!r}{did_you_mean(name, known)}")
    return options


def _limited(built, context):
    """The network with the context that is asked for: a shorter one, or a longer one of positions that stretch."""
    if context is None:
        return built
    longest = built.facts["context"]
    if not isinstance(context, int) or context < 1 or (context > longest and "stretches" not in built.facts):
        raise RequestError(f"context should be 1 .. {longest} tokens, as the model's, is {context!r}")
    return replace(built, facts={**built.facts, "context": context})


def _is_named(draft) -> bool:
    """Whether a draft model has still to be loaded."""
    return draft is not None and not isinstance(draft, Model)


def _tokenizer_of(checkpoint, spec) -> Callable[[], Any]:
    """A function that loads the tokenizer when it is first called."""
    @cache
    def tokenizer():
        from numflow.tokenizer import load_tokenizer

        return load_tokenizer(checkpoint, spec.section("tokenizer"))

    return tokenizer


def _vocabulary_released(tokenizer, checkpoint):
    """The tokenizer; it holds the vocabulary of a GGUF file now, which is dropped from the metadata."""
    if checkpoint.format == "gguf":
        for key in ("tokens", "merges", "scores", "token_type"):
            checkpoint.config.pop(f"tokenizer.ggml.{key}", None)
    release_memory()
    return tokenizer


def _recipe(checkpoint, spec):
    from numflow.engine.tasks.embedding_recipe import read_recipe

    return read_recipe(checkpoint.files, network.resolve(spec, checkpoint)[0].option("generation", "pooling"))


def _ends(checkpoint) -> frozenset[int]:
    """End-of-text ids as the model's configuration has them: one id or a list."""
    return frozenset(_ids(checkpoint, "eos_token_id"))


def _begin(checkpoint) -> int | None:
    """The id that starts a text, as the model's configuration has it."""
    return next(iter(_ids(checkpoint, "bos_token_id")), None)


def _ids(checkpoint, role: str) -> list[int]:
    """One id or a list of them."""
    keys = [key for key in (role, f"tokenizer.ggml.{role}") if checkpoint.config.get(key) is not None]
    found = checkpoint.config[keys[0]] if keys else []
    ids = found if isinstance(found, list) else [found]
    if not all(type(id) is int for id in ids):
        raise FormatError(f"{checkpoint.files.get('config', checkpoint.path)}: {keys[0]}: expected a token's id or a "
                          f"list of ids, found {quoted(found)}")
    return ids
