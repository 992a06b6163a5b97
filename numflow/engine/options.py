"""Options of loading and of the engine, defined only here: name, type, default, help, check, aliases.

Arguments of `numflow.load` and `Engine`, options of the commands, and tables of the service's configuration are derived
from these two classes. In a help text, {name} is replaced by another option in the spelling of the interface.
"""

from dataclasses import dataclass, field, fields

from numflow.errors import RequestError, option, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from dataclasses import Field
    from typing import Any

KV = ("f32", "f16", "bf16", "q8", "q6", "q5", "q4", "q3h", "q3", "q2")  # types of cached keys and values
STATES = ("f32", "f16", "bf16", "q8")  # types of states of recurrent layers
COMMANDS, CONFIG = "commands", "config"  # every command that runs a model; the service's configuration


@dataclass(frozen=True, eq=False)
class Check:
    """Check of a value: its type is one of `kinds`, and `good` holds. wanted: description of valid values."""

    kinds: "type | tuple[type, ...]"
    wanted: str
    good: "Callable[[Any], Any]" = lambda value: True

    def __call__(self, value: "Any", name: str) -> "Any":
        """Check a value and return it.

        Raises:
            RequestError: the value is not valid.
        """
        right = isinstance(value, self.kinds) and (self.kinds is bool or not isinstance(value, bool))
        if not right or not self.good(value):
            raise RequestError(f"{name} should be {self.wanted}, is {quoted(value)}")
        return value


def one_of(*known: str) -> Check:
    """Check for one of several words."""
    return Check(str, f"one of {', '.join(known)}", lambda value: value in known)


TEXT = Check(str, "text", bool)
PATH = Check(object, "text", lambda value: (isinstance(value, str) and value) or hasattr(value, "__fspath__"))
TEXTS = Check((str, list, tuple), "a text, or a list of them",
              lambda value: value and all(isinstance(text, str) and text for text in value))
TABLE = Check(dict, "a table")  # the reader of the table checks its content
FLAG = Check(bool, "true or false")
WHOLE = Check(int, "a whole number")
COUNT = Check(int, "a whole number from 1", lambda value: value >= 1)
FROM_ZERO = Check(int, "a whole number from 0", lambda value: value >= 0)
PERCENT = Check((int, float), "a number 0 .. 100", lambda value: 0 <= value <= 100)
SIZE = Check((int, float, str), 'bytes, or text such as "8 GB" or "512MiB"')
DEVICES = Check(str, "text")  # partition/cut/devices.py checks the text
KV_TYPE = Check(str, f"one of auto, {', '.join(KV)}", lambda value: value.lower() in ("auto", *KV))


@dataclass(frozen=True)
class OptionFacts:
    """Facts of an option beside its name, type and default.

    metavar: placeholder of the value in a command's help. check: check of values other than None.
    aliases: other names in the service's configuration, such as those of Inferflow. flag: option in the shell.
    of:      backends with this option; (): all. shown: description of the default, if that is None.
    places:  interfaces besides Python: COMMANDS, CONFIG.
    """

    help: str
    metavar: str
    check: Check
    aliases: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    shown: str = ""
    flag: str = ""
    places: tuple[str, ...] = (COMMANDS, CONFIG)

    def help_for(self, spell: "Callable[[str, str], str]") -> str:
        """Help text, with other options spelled by `spell`."""
        return _spelled(self.help, spell)

    def shown_for(self, spell: "Callable[[str, str], str]") -> str:
        """Description of the default, with other options spelled by `spell`."""
        return _spelled(self.shown, spell)


def opt(default: "Any", help: str, metavar: str, check: Check, aliases: tuple[str, ...] = (), **more: "Any") -> "Any":
    """Field of a table of options: default and facts."""
    return field(default=default, metadata={"option": OptionFacts(help, metavar, check, aliases, **more)})


@dataclass(frozen=True)
class LoadOptions:
    """Options of numflow.load."""

    threads: int | None = opt(None, "Number of CPU threads.", "N", COUNT, ("cpu_threads",), shown="one per core")
    backend: str = opt(
        "cpu", "Device type: cpu (compiled kernels), cuda (an NVIDIA GPU) or reference (NumPy, slow).", "NAME", TEXT,
        ("device",), flag="--device")
    activations: str = opt(
        "int8", "Type of the activations in matrix products: int8 (fast), int16 (much closer to float32), auto (int16 "
        "in the steps that run only for rows whose logits are wanted, int8 elsewhere), bf16 (fast with float "
        "weights), fp8 (8-bit floats with FP8 weights, on an H100, B200 or RTX 40 and 50), nvfp4 (4-bit floats with "
        "NVFP4 and MXFP4 weights, on a B200 or RTX 50) or f32 (exact float32 arithmetic).", "TYPE",
        one_of("int8", "int16", "auto", "bf16", "fp8", "nvfp4", "f32"))
    weights: str | None = opt(
        None, "Quantise the weights while loading: a scheme (q2, q3, q3h, q4, q5, q6, q8), a preset (q4-mix), a GGUF "
        "type or mix (Q4_K_M) or a recipe file.", "NAME", PATH,
        ("device_weight_data_type",), shown="as stored")
    imatrix: str | None = opt(
        None, "Importance matrix for {weights}: a file of `numflow imatrix` or of GGML's programs.", "FILE", PATH)
    calibration: bool = opt(
        True, "With {weights} below 6 bits and without {imatrix}: calibrate, once, on text that the model generates.",
        "", FLAG)
    adapter: list[str] | None = opt(  # noqa: RUF009  the default is None
        None, "LoRA adapter to merge into the weights: a PEFT folder or a GGUF file. DIR=0.5 scales the adapter by "
        "0.5. May be repeated. The changed matrices become float32 unless {weights} is given.", "DIR[=SCALE]", TEXTS)
    adapters: dict | None = opt(  # noqa: RUF009
        None, "LoRA adapters that requests may name as their model: name = folder or file, or name = [folder, scale].",
        "TABLE", TABLE, places=(CONFIG,))
    merge: str | list[str] | None = opt(  # noqa: RUF009
        None, "Names of adapters to merge into the weights when the model is loaded.", "NAME", TEXTS, places=(CONFIG,))
    kv: str | None = opt(
        None, f"Type of the KV cache: {', '.join(KV[:-1])} or {KV[-1]}.", "TYPE", KV_TYPE,
        ("device_kv_cache_data_type",), shown="bf16 on a CPU, f16 on a GPU, f32 with float32 arithmetic")
    kv_k: str | None = opt(None, "Type of cached keys alone.", "TYPE", KV_TYPE, shown="{kv}")
    kv_v: str | None = opt(None, "Type of cached values alone.", "TYPE", KV_TYPE, shown="{kv}")
    state_type: str = opt(
        "auto", f"Type of the state of recurrent layers: {', '.join(STATES[:-1])} or {STATES[-1]} (8 bits).",
        "TYPE", one_of("auto", *STATES), shown="f32")
    iq: str = opt(
        "auto", "Form of IQ1, IQ2 and IQ3 weights in the memory of a CPU: compact (as large as in the GGUF file), fast "
        "(1.2 to 1.6 times as large, decoded 1.8 to 4 times as fast) or auto (fast for 64 MB and more, if the model "
        "then takes at most half of the free memory).", "NAME", one_of("auto", "compact", "fast"))
    host_embeddings: bool = opt(
        False, "On a GPU: keep the token embeddings in host memory.", "", FLAG, of=("cuda",))
    host_kv_percent: float = opt(
        0.0, "On a GPU: percentage of the layers whose KV cache is in host memory.", "N", PERCENT,
        ("host_kv_cache_percent",), of=("cuda",))
    cpu_layers: int = opt(
        0, "With {backend} cuda: run the first N layers on the CPU; -N: the last N layers.", "N", WHOLE,
        of=("cuda",))
    devices: str | None = opt(
        None, "Split the model over several devices. 0;1: by layer (pipeline parallelism). 0&1: by tensor (tensor "
        "parallelism). 0&1;2&3: both. 0*2;1: device 0 gets twice as much. With {backend} cuda a number is a GPU, and "
        "cpu may be one of the devices (cpu;0); otherwise a device is a set of CPU threads.", "TEXT", DEVICES,
        shown="one device")
    transport: str = opt(
        "threads", "How {devices} run: threads, processes with shared memory (CPU only) or ray (one Ray actor per "
        "group of devices).", "NAME", TEXT)
    collectives: str | None = opt(
        None, "All-reduce between GPUs: copies (from GPU to GPU), nccl, or auto (nccl if it is installed and every "
        "device is a separate GPU).", "NAME", one_of("auto", "copies", "nccl"), of=("cuda",), shown="auto")
    spec: str | None = opt(
        None, "Model specification: a file, or a name from `numflow spec list`.", "FILE", PATH,
        ("model_specification_file", "model_spec_file"), shown="detected")
    offline: bool = opt(False, "Never use the network (same as NUMFLOW_OFFLINE=1).", "", FLAG, places=(COMMANDS,))
    progress: bool = opt(
        True, "Show the progress of downloads and of quantisation on standard error.", "", FLAG, places=())
    draft: str | None = opt(
        None, "Draft for speculative decoding: a smaller model with the same vocabulary, an EAGLE-3 draft trained for "
        "this model, or mtp (the model's own multi-token prediction block).", "MODEL", PATH, places=(CONFIG,))
    context: int | None = opt(
        None, "Context length in tokens, prompt and answer together.", "N", COUNT, ("max_context_len",),
        shown="the model's", places=(CONFIG,))
    chunk: int = opt(512, "Prompt tokens that run in one batch.", "N", COUNT, places=(CONFIG,))


@dataclass(frozen=True)
class EngineOptions:
    """Options of Engine."""

    max_batch: int = opt(
        32, "Sequences that are decoded at the same time; every sample and every beam counts as one.", "N", COUNT,
        ("max_concurrent_queries",))
    kv_memory: int | str | None = opt(
        None, "Memory for the KV cache, such as 2GB, reserved when the model is loaded.", "SIZE", SIZE,
        shown="grows on demand, and leaves a tenth of the memory free")
    max_queue: int = opt(1024, "Requests that may wait.", "N", FROM_ZERO, places=())
    max_step_tokens: int = opt(
        512, "Tokens of one step. A longer prompt is split over several steps, and other requests run in the same "
        "steps.", "N", COUNT)
    batching: str = opt(
        "dynamic", "dynamic (continuous batching), or static: a new batch starts when the last one has ended (for "
        "experiments).", "NAME", one_of("dynamic", "static"), places=())
    preemption: str = opt(
        "swap", "KV cache of a preempted sequence, when memory runs out: swap (to host memory) or recompute.", "NAME",
        one_of("swap", "recompute"))
    prefix_cache: bool = opt(
        True, "Keep the KV cache of finished texts: a request with the same beginning starts sooner.", "", FLAG)
    prefix_disk: int | str | None = opt(
        None, "Disk space, such as 4GB, for a prefix cache that survives a restart; it is written when the model is "
        "unloaded.", "SIZE", SIZE, shown="nothing is written")


def rows(table: type, place: str = "") -> "Iterator[tuple[Field, OptionFacts]]":
    """Fields of a table with the facts of their options; with `place`, only the options of that interface."""
    for row in fields(table):
        if not place or place in row.metadata["option"].places:
            yield row, row.metadata["option"]


OPTIONS = {found[0].name: found for table in (LoadOptions, EngineOptions) for found in rows(table)}  # of both tables


def check(options: "LoadOptions | EngineOptions") -> None:
    """Check every value that is not None.

    Raises:
        RequestError: a value has a wrong type, or is out of range.
    """
    for row, found in rows(type(options)):
        value = getattr(options, row.name)
        if value is not None or row.default is not None:
            found.check(value, option(row.name))


def changed(options: "LoadOptions | EngineOptions") -> "Mapping[str, Any]":
    """Options that differ from their defaults."""
    return {row.name: value for row in fields(options) if (value := getattr(options, row.name)) != row.default}


def described(table: type) -> "Callable[[Any], Any]":
    """Decorator for a function or class that takes the options of a table as keywords: adds them to its signature, and
    to its docstring in place of {options}."""
    def fill(owner):
        from inspect import Parameter, signature

        parameters = list(signature(owner).parameters.values())
        names = {parameter.name for parameter in parameters}
        more = [Parameter(row.name, Parameter.KEYWORD_ONLY, default=row.default, annotation=row.type)
                for row, _ in rows(table) if row.name not in names]
        rest = [parameters.pop()] if not isinstance(owner, type) else parameters[len(parameters):]  # **options
        parameters = [parameter for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]
        owner.__signature__ = signature(owner).replace(parameters=[*parameters, *more, *rest])
        before = owner.__doc__.partition("{options}")[0].rpartition("\n")[2]  # Python 3.13 removes the indentation
        owner.__doc__ = owner.__doc__.replace("{options}", f"\n{before}".join(_lines(table)))
        return owner

    return fill


def in_shell(name: str, value: str = "") -> str:
    """Spelling of an option in the shell."""
    flag = (name in OPTIONS and OPTIONS[name][1].flag) or f"--{name.replace('_', '-')}"
    plain = value[1:-1] if value[1:-1].replace("-", "").isalnum() else value  # without unnecessary quotes
    return f"{flag} {plain if value[:1] == chr(39) else value}" if value else flag


def _lines(table: type) -> "Iterator[str]":
    """Lines of a docstring for the options: name, help, and the default if the signature does not show it."""
    for row, found in rows(table):
        default = f" Default: {found.shown_for(_name)}." if found.shown else ""
        line = f"{row.name + ':':<17}"
        for word in (found.help_for(_name) + default).split():
            if len(line) + len(word) > 115:
                yield line.rstrip()
                line = " " * 17
            line += word + " "
        yield line.rstrip()


def _name(name: str, value: str = "") -> str:
    return name


def _spelled(text: str, spell: "Callable[[str, str], str]") -> str:
    first, *rest = text.split("{")
    for part in rest:
        name, _, more = part.partition("}")
        first += spell(name, "") + more
    return first
