"""Loading of a Model from a name or path: checkpoint, spec, network, plan, executor."""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from numflow import formats, network, registry
from numflow.engine.adapters.given import by_request, expanded, to_merge, with_adapters
from numflow.engine.adapters.loaded import Adapters
from numflow.engine.model import Model
from numflow.engine.options import LoadOptions, changed, check, described, rows
from numflow.engine.request.ahead import check_draft
from numflow.engine.request.defaults import read_defaults
from numflow.engine.request.facts import ModelFacts
from numflow.engine.request.prompt import Prompts
from numflow.engine.runner.kv_memory import plan_memory
from numflow.engine.runner.suspects import Suspects
from numflow.engine.speculate.blocks import build_block, find_block
from numflow.engine.tasks.embedding_recipe import EmbeddingRecipe
from numflow.errors import DeviceError, FormatError, RequestError, did_you_mean, option, quoted
from numflow.executor.contract import ADAPT, Quantiser
from numflow.formats.mapped import release_memory
from numflow.machine import free_memory
from numflow.network.adapters.steps import adaptable
from numflow.ops import Network
from numflow.partition.cut.devices import CPU, parse_devices
from numflow.partition.cut.plan import single_device
from numflow.registry.progress import reporter
from numflow.spec.resolve import part_of

# Modules of the executors by name; imported when the executor is chosen.
BACKENDS = {"reference": "numflow.reference.program", "cpu": "numflow.cpu.program", "cuda": "numflow.cuda.program"}
OF_HOST = ("reference", "cpu")  # backends with keys and values in host memory
Before = Callable[[Network, Prompts, Callable[[], EmbeddingRecipe]], None]


@described(LoadOptions)
def load(path_or_name: str | Path, backend: str = LoadOptions.backend, spec: str | Path | None = LoadOptions.spec,
         activations: str = LoadOptions.activations, threads: int | None = LoadOptions.threads, *,
         before: "Before | None" = None, **given: Any) -> Model:
    """Load a model, ready to run.

    path_or_name:    A weight file, a model folder, a known model's name, or an id of a model hub.
    {options}
    before:          Called with the network, the Prompts, and a function that reads the embedding recipe, before
                     weights are read and kernels are compiled. An exception that it raises ends the loading.
    given:           Further options of the executor's Program.

    `activations`: int16 stores two int8 per value, about 200 times more accurate than int8; CPU only. Checkpoints with
    float weights always compute in float32. `context` is at most the model's context, except with dynamic scaling of
    positions. `weights`: quantised weights are cached for the next start (network/quantise/kept.py). `threads` is the
    number per device. `draft` may be a Model; a draft given by name is loaded with the same backend, activations and
    threads, and closed with the model. `adapters` is {"name": folder} or {"name": (folder, scale)}: adapters named by
    `merge` are merged into the weights, requests choose among the others (`generate(..., adapter="name")`), and
    `model.adapters` loads more at any time; for that, `{}` is enough.

    Raises:
        ModelNotFoundError, DownloadError, FormatError, SpecError, NetworkError: the model cannot be found or read.
        DeviceError: unknown backend, or a package or device that it needs is missing.
        RequestError: an unknown option, or a value out of range.
    """
    begin, free = time.perf_counter(), free_memory()
    ours = {row.name for row, _ in rows(LoadOptions)}
    how = LoadOptions(backend=backend, spec=spec, activations=activations, threads=threads,
                      **{name: given.pop(name) for name in ours & given.keys()})
    program_class = _executor(backend)
    options = _program_options(program_class, how, given)
    several, merging = _several(how), to_merge(how.adapters, how.merge, how.adapter)
    choosing = _check_adapters(by_request(how.adapters, how.merge), program_class, several and how.transport == "ray")
    path = registry.resolve(path_or_name, offline=how.offline, progress=how.progress)
    merging = tuple(adapter.found(how.offline, how.progress) for adapter in merging)
    checkpoint = formats.open_checkpoint(path)
    chosen = network.choose_spec(checkpoint, spec)
    checkpoint = _merged(checkpoint, chosen, merging, how)
    tokenizer, defaults = _tokenizer_of(checkpoint, chosen), chosen.section("generation")
    texts, headers = (defaults.get("template", ""), defaults.get("system_prompt", "")), None
    block = find_block(how.draft, chosen, checkpoint, how.offline, how.progress)
    if block is not None and several:
        raise RequestError(f"{option('draft', how.draft)} drafts from the model's hidden states, on one device: "
                           f"leave out {option('devices')}")

    def build():
        return _limited(network.build(chosen, checkpoint, not several, block and block.taps), how.context)

    if before is not None or _is_named(how.draft):
        headers = build()
        if before is not None:
            before(headers, Prompts(tokenizer, *texts), lambda: _recipe(checkpoint, chosen))
        if block is not None:
            build_block(block, headers, chosen, checkpoint)
        elif _is_named(how.draft):
            check_draft(ModelFacts.of(headers), how.draft, how.offline, how.progress)
    quantising = None
    with closing(reporter(how.progress and how.weights is not None)) as reports, \
            _quantiser(program_class, how, options) as rows_of:
        if how.weights is not None:
            from numflow.engine.requantise import Requantising, requantised

            quantising = Requantising(how.weights, how.imatrix, how.calibration, backend,
                                      how.transport != LoadOptions.transport)
            checkpoint = requantised(checkpoint, chosen, quantising, threads, reports, not merging, rows_of)
            headers = None
        built = headers or build()
        if not several:
            built = built if choosing is None else adaptable(built, checkpoint)
            program = program_class(single_device(built, backend).part(0), network.WeightSource(built, checkpoint),
                                    **options)
        else:
            from numflow.engine.placed import FileWeights, placed_program

            program = placed_program(built, backend, BACKENDS, how.devices, checkpoint,
                                     FileWeights(checkpoint.path, chosen, quantising, merging), how.transport,
                                     cpu_layers=how.cpu_layers, options=options, adapting=choosing is not None)
    scores = _score_head(checkpoint, chosen)
    model = Model(built, program, lambda: _vocabulary_released(tokenizer(), checkpoint), _ends(checkpoint, chosen),
                  _begin(checkpoint, chosen), *texts, how.chunk,
                  lambda: _recipe(checkpoint, chosen), lambda: read_defaults(checkpoint),
                  lambda: registry.sampling(path_or_name, path), scores)
    model.runner.suspects = Suspects(built, checkpoint, () if scores is None else scores.tensors)
    model.bits_per_weight = network.bits_per_weight(built, checkpoint)
    if choosing is not None:
        _add_adapters(model, Adapters(model.runner, checkpoint, chosen, how.offline, how.progress),
                      choosing)
    if block is not None:
        _add_block(model, *build_block(block, built, chosen, checkpoint), program_class, options)
    elif how.draft is not None:
        _add_draft(model, how.draft, lambda: load(how.draft, backend, None, activations, threads, offline=how.offline,
                                                  progress=how.progress))
    release_memory()
    model.core.plan(plan_memory(program, free if backend in OF_HOST and how.transport != "ray" else None, model.runner))
    model.load_s = time.perf_counter() - begin
    return model


def model_of(checkpoint, spec, backend: str, threads: int | None = None) -> Model:
    """Model of an open checkpoint, on one device, with default options.

    Raises:
        SpecError, NetworkError, FormatError, DeviceError: as `load`.
    """
    built = network.build(spec, checkpoint)
    program = _executor(backend)(single_device(built, backend).part(0), network.WeightSource(built, checkpoint),
                                 threads=threads)
    model = Model(built, program, _tokenizer_of(checkpoint, spec), _ends(checkpoint, spec),
                  _begin(checkpoint, spec))
    model.runner.suspects = Suspects(built, checkpoint)
    return model


def _merged(checkpoint, spec, adapters, how: LoadOptions):
    """Checkpoint with adapters merged; reports parts that are left out, and matrices that became larger."""
    with closing(reporter(how.progress and bool(adapters))) as reports:
        found = with_adapters(checkpoint, spec, adapters, reports.note)
        if how.progress and how.weights is None and (line := expanded(checkpoint, found)):
            reports.note(line)
    return found


def _check_adapters(adapters, program_class, over_ray: bool):
    """Check that requests can choose adapters; returns the adapters."""
    if adapters is not None and (over_ray or ADAPT not in program_class.can):
        name = next(iter(adapters), "NAME")
        raise RequestError(f"{option('adapters')}: requests cannot choose among adapters on a Ray cluster; merge one "
                           f"of them instead: {option('merge', name)}")
    return adapters


def _add_adapters(model: Model, adapters: Adapters, given) -> None:
    """Load adapters for requests; closes the model if one cannot be loaded."""
    model.adapters = adapters
    try:
        for name, value in given.items():
            adapters.load(name, value)
    except BaseException:
        model.close()
        raise


def _add_draft(model: Model, draft, load_it) -> None:
    """Set the draft model, loaded if necessary; closes all on failure."""
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


def _add_block(model: Model, built: Network, checkpoint, program_class, options) -> None:
    """Set the draft block, which reads the model's residual streams; closes the model on failure."""
    try:
        weights = network.WeightSource(built, checkpoint)
        shared = {"beside": model.program} if "beside" in inspect.signature(program_class).parameters else {}
        model.drafts_with(built, program_class(single_device(built, "").part(0), weights, **options, **shared))
    except BaseException:
        model.close()
        raise


@contextmanager
def _quantiser(program_class, how: LoadOptions, options: dict[str, Any]) -> Iterator[Quantiser | None]:
    """Quantiser on the first GPU of the devices, if there is one; else None. Devices in other processes quantise
    themselves."""
    found = None
    if how.weights is not None and how.transport == LoadOptions.transport:
        first = next((device for device in parse_devices(how.devices or "0") if device.name != CPU), None)
        found = None if first is None else program_class.quantiser(options.get("gpu", "auto"), int(first.name))
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def _executor(backend: str):
    if backend not in BACKENDS:
        raise DeviceError(f"no backend {backend!r}{did_you_mean(backend, BACKENDS)}")
    return import_module(BACKENDS[backend]).Program


def _program_options(program_class, how: LoadOptions, given: dict[str, Any]) -> dict[str, Any]:
    """Options of the executor's Program: the fields of LoadOptions that it accepts, and `given`."""
    check(how if _is_named(how.draft) else replace(how, draft=None))
    for row, found in rows(LoadOptions):
        if found.of and how.backend not in found.of and (value := getattr(how, row.name)) != row.default:
            raise RequestError(f"{option(row.name, value)} is for GPUs ({option('backend', found.of[0])}); backend "
                               f"{how.backend!r} has no such option")
    accepted = [name for name in inspect.signature(program_class).parameters
           if name not in ("network", "weights", "world", "device", "progress", "beside")]
    for name in given:
        if name not in accepted:
            known = {*accepted, *(row.name for row, _ in rows(LoadOptions))}
            raise RequestError(f"backend {how.backend!r} has no option {name!r}{did_you_mean(name, known)}")
    kinds = {"kv_k": how.kv_k or how.kv, "kv_v": how.kv_v or how.kv}
    return ({"activations": how.activations, "threads": how.threads}
            | {name: value for name, value in changed(how).items() if name in accepted}
            | {name: kind.lower() for name, kind in kinds.items() if kind is not None} | given)


def _several(how: LoadOptions) -> bool:
    """Whether the model is placed on several devices. Also checks options that depend on others."""
    several = how.devices is not None or how.cpu_layers != 0
    if not several and how.transport != LoadOptions.transport:
        raise RequestError(f"{option('transport', how.transport)} is between devices: name them with "
                           f"{option('devices', '0;1')}")
    if how.imatrix is not None and how.weights is None:
        raise RequestError(f"{option('imatrix')} helps quantising: say with {option('weights')} what to quantise to")
    if how.imatrix is not None and not how.calibration:
        raise RequestError(f"{option('imatrix')} is a calibration: without one, leave it out")
    return several


def _limited(built, context):
    """Network with the given context: a shorter one, or a longer one with dynamic scaling of positions."""
    if context is None:
        return built
    longest = built.facts["context"]
    if context > longest and "stretches" not in built.facts:
        raise RequestError(f"{option('context')} should be 1 .. {longest} tokens, as the model's, is {context!r}")
    return replace(built, facts={**built.facts, "context": context})


def _is_named(draft) -> bool:
    """Whether the draft is a name or path that has to be loaded."""
    return draft is not None and not isinstance(draft, Model)


def _tokenizer_of(checkpoint, spec) -> Callable[[], Any]:
    """A function that loads the tokenizer when it is first called."""
    @cache
    def tokenizer():
        from numflow.tokenizer import load_tokenizer

        return load_tokenizer(checkpoint, spec.section("tokenizer"))

    return tokenizer


def _vocabulary_released(tokenizer, checkpoint):
    """The tokenizer. Drops the vocabulary from the metadata of a GGUF file, since the tokenizer has it."""
    if checkpoint.format == "gguf":
        for key in ("tokens", "merges", "scores", "token_type"):
            checkpoint.config.pop(f"tokenizer.ggml.{key}", None)
    release_memory()
    return tokenizer


def _recipe(checkpoint, spec):
    from numflow.engine.tasks.embedding_recipe import read_recipe, stored_layers

    resolved, names = network.resolve(spec, checkpoint)
    recipe = read_recipe(checkpoint.files, resolved.option("generation", "pooling"), checkpoint.config)
    layers = stored_layers(names, resolved.option("stack", "width"))
    return replace(recipe, layers=(*layers, *recipe.layers)) if layers else recipe


def _score_head(checkpoint, spec):
    from numflow.engine.tasks.scores import read_score_head

    return read_score_head(checkpoint, spec)


def _ends(checkpoint, spec) -> frozenset[int]:
    """End token ids of the model's configuration."""
    return frozenset(_ids(checkpoint, spec, "eos_token_id"))


def _begin(checkpoint, spec) -> int | None:
    """Start token id of the model's configuration."""
    return next(iter(_ids(checkpoint, spec, "bos_token_id")), None)


def _ids(checkpoint, spec, role: str) -> list[int]:
    """Token ids of a role in the configuration, or else in the part of it that the spec reads."""
    config = checkpoint.config
    part = part_of(spec.section(checkpoint.naming).get("within", []), config)[1]
    if config.get(role) is None and part.get(role) is not None:
        config = part
    keys = [key for key in (role, f"tokenizer.ggml.{role}") if config.get(key) is not None]
    found = config[keys[0]] if keys else []
    ids = found if isinstance(found, list) else [found]
    if not all(type(id) is int for id in ids):
        raise FormatError(f"{checkpoint.files.get('config', checkpoint.path)}: {keys[0]}: expected a token's id or a "
                          f"list of ids, found {quoted(found)}")
    return ids
