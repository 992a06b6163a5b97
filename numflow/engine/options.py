"""Options of loading a model and of the engine, each written here alone: name, type, default, help, check, other names.

Arguments of `numflow.load` and `Engine`, the commands' options and the tables of the service's configuration are made
of these two classes. In help, {name} is another option, as its reader writes it.
"""

from dataclasses import dataclass, field, fields

from numflow.errors import RequestError, option, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from dataclasses import Field
    from typing import Any

KV = ("f32", "f16", "bf16", "q8", "q6", "q5", "q4", "q3h", "q3", "q2")  # types of cached keys and values
STATES = ("f32", "f16", "bf16", "q8")  # types of their states
COMMANDS, CONFIG = "commands", "config"  # every command that runs a model; the service's configuration


@dataclass(frozen=True, eq=False)
class Check:
    """Values of these types for which `good` holds. wanted: the same in words."""

    kinds: "type | tuple[type, ...]"
    wanted: str
    good: "Callable[[Any], Any]" = lambda value: True

    def __call__(self, value: "Any", name: str) -> "Any":
        """The value.

        Raises:
            RequestError: it is none of these.
        """
        right = isinstance(value, self.kinds) and (self.kinds is bool or not isinstance(value, bool))
        if not right or not self.good(value):
            raise RequestError(f"{name} should be {self.wanted}, is {quoted(value)}")
        return value


def one_of(*known: str) -> Check:
    """One of these words."""
    return Check(str, f"one of {', '.join(known)}", lambda value: value in known)


TEXT = Check(str, "text", bool)
PATH = Check(object, "text", lambda value: (isinstance(value, str) and value) or hasattr(value, "__fspath__"))
TEXTS = Check((str, list, tuple), "a text, or a list of them",
              lambda value: value and all(isinstance(one, str) and one for one in value))
TABLE = Check(dict, "a table")  # whoever reads it checks what is in it
FLAG = Check(bool, "true or false")
WHOLE = Check(int, "a whole number")
COUNT = Check(int, "a whole number from 1", lambda value: value >= 1)
FROM_ZERO = Check(int, "a whole number from 0", lambda value: value >= 0)
PERCENT = Check((int, float), "a number 0 .. 100", lambda value: 0 <= value <= 100)
SIZE = Check((int, float, str), 'bytes, or text such as "8 GB" or "512MiB"')
DEVICES = Check(str, "text")  # partition/cut/devices.py says what is wrong in it
KV_TYPE = Check(str, f"one of auto, {', '.join(KV)}", lambda value: value.lower() in ("auto", *KV))


@dataclass(frozen=True)
class OptionFacts:
    """Facts of an option beside its name, type and default.

    metavar: its value in a command's help. check: its values, where it is not None.
    aliases: other names in the service's configuration, those of Inferflow among them. flag: its name in the shell.
    of:      the backends that have it; (): all. shown: the default in words, where it is None.
    places:  where it is offered beside Python: COMMANDS, CONFIG.
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
        """The help, with other options as `spell` writes them."""
        return _spelled(self.help, spell)

    def shown_for(self, spell: "Callable[[str, str], str]") -> str:
        """The default in words, likewise."""
        return _spelled(self.shown, spell)


def opt(default: "Any", help: str, metavar: str, check: Check, aliases: tuple[str, ...] = (), **more: "Any") -> "Any":
    """A field of a table: its default and its facts."""
    return field(default=default, metadata={"option": OptionFacts(help, metavar, check, aliases, **more)})


@dataclass(frozen=True)
class LoadOptions:
    """Options of numflow.load."""

    threads: int | None = opt(None, "CPU threads.", "N", COUNT, ("cpu_threads",), shown="one per core")
    backend: str = opt(
        "cpu", "What runs it: cpu (compiled), cuda (an NVIDIA GPU), reference (NumPy, slow).", "NAME", TEXT,
        ("device",), flag="--device")
    activations: str = opt(
        "int8", "int8 (fast), int16 (much closer), auto (int16 where prompts do not feel it), bf16 (fast with float "
        "weights), fp8 (8-bit floats with FP8 weights, on an H100 or RTX 40 and 50), nvfp4 (4-bit floats with NVFP4 "
        "and MXFP4 weights, on an RTX 50) or f32 (exact float32 arithmetic).", "TYPE",
        one_of("int8", "int16", "auto", "bf16", "fp8", "nvfp4", "f32"))
    weights: str | None = opt(
        None, "Quantise while loading: a scheme (q2, q3, q3h, q4, q5, q6, q8), a preset (q4-mix), a GGUF type or mix "
        "(Q4_K_M) or a recipe file.", "NAME", PATH,
        ("device_weight_data_type",), shown="as stored")
    imatrix: str | None = opt(None, "With {weights}: what `numflow imatrix` has measured.", "FILE", PATH)
    calibration: bool = opt(
        True, "With {weights} of less than 6 bits and no {imatrix}: calibrate on text that the model writes, once.", "",
        FLAG)
    adapter: list[str] | None = opt(  # noqa: RUF009  the default is None
        None, "An adapter (LoRA) to merge: PEFT's folder, or a GGUF file; DIR=0.5 is half of it; may be repeated. "
        "Matrices that it changes become float32, unless {weights} says otherwise.", "DIR[=SCALE]", TEXTS)
    adapters: dict | None = opt(  # noqa: RUF009
        None, "Adapters by name: a folder or file each, or [folder, scale].", "TABLE", TABLE, places=(CONFIG,))
    merge: str | list[str] | None = opt(  # noqa: RUF009
        None, "Names of adapters to merge when the model is loaded.", "NAME", TEXTS, places=(CONFIG,))
    kv: str | None = opt(
        None, f"How keys and values are cached: {', '.join(KV[:-1])} or {KV[-1]}.", "TYPE", KV_TYPE,
        ("device_kv_cache_data_type",), shown="bf16 on a processor, f16 on a GPU, f32 with float32 arithmetic")
    kv_k: str | None = opt(None, "The same for keys alone.", "TYPE", KV_TYPE, shown="{kv}")
    kv_v: str | None = opt(None, "The same for values alone.", "TYPE", KV_TYPE, shown="{kv}")
    state_type: str = opt(
        "auto", f"How recurrent layers keep the state of a head: {', '.join(STATES[:-1])} or {STATES[-1]} (8 bits).",
        "TYPE", one_of("auto", *STATES), shown="f32")
    host_embeddings: bool = opt(
        False, "On a GPU: keep the table of tokens in the host's memory.", "", FLAG, of=("cuda",))
    host_kv_percent: float = opt(
        0.0, "On a GPU: share of the layers whose cached keys and values are in the host's memory.", "N", PERCENT,
        ("host_kv_cache_percent",), of=("cuda",))
    cpu_layers: int = opt(
        0, "With {backend} cuda: run so many layers on the processor, the first ones; -N: the last N.", "N", WHOLE,
        of=("cuda",))
    devices: str | None = opt(
        None, "Place the model on several devices: 0;1 by layer, 0&1 by tensor, 0&1;2&3 both; 0*2;1 gives device 0 "
        "twice as much. On the CPU a device is a set of threads; with {backend} cuda numbers are GPUs, and cpu may "
        "stand beside them: cpu;0.", "TEXT", DEVICES, shown="one device")
    transport: str = opt(
        "threads", "With {devices}: threads; on the CPU also processes with shared memory between; or ray (an actor of "
        "a Ray cluster for each group).", "NAME", TEXT)
    collectives: str | None = opt(
        None, "How GPUs of a group sum: copies from GPU to GPU, nccl, or auto: nccl where it is installed and each "
        "device has a card of its own.", "NAME", one_of("auto", "copies", "nccl"), of=("cuda",), shown="auto")
    spec: str | None = opt(
        None, "Specification: a file, or a name that `numflow spec list` shows.", "FILE", PATH,
        ("model_specification_file", "model_spec_file"), shown="detected")
    offline: bool = opt(False, "Never touch the network (also NUMFLOW_OFFLINE=1).", "", FLAG, places=(COMMANDS,))
    progress: bool = opt(
        True, "Show on standard error how downloading and quantising go.", "", FLAG, places=())
    draft: str | None = opt(
        None, "What guesses tokens ahead (speculative decoding): a smaller model of the same vocabulary, an EAGLE-3 "
        "draft made for the model, or mtp: the block of its own that predicts a further token.", "MODEL",
        PATH, places=(CONFIG,))
    context: int | None = opt(
        None, "Longest text in tokens.", "N", COUNT, ("max_context_len",), shown="the model's", places=(CONFIG,))
    chunk: int = opt(512, "Rows of a prompt that run at once.", "N", COUNT, places=(CONFIG,))


@dataclass(frozen=True)
class EngineOptions:
    """Options of Engine."""

    max_batch: int = opt(
        32, "Sequences that run side by side (samples and beams count each).", "N", COUNT, ("max_concurrent_queries",))
    kv_memory: int | str | None = opt(
        None, "Memory for keys and values, such as 2GB, reserved at once.", "SIZE", SIZE,
        shown="as much as is needed, up to what leaves the machine usable")
    max_queue: int = opt(1024, "Requests that may wait.", "N", FROM_ZERO, places=())
    max_step_tokens: int = opt(
        512, "Tokens of one step; longer prompts are cut, so that others go on meanwhile.", "N", COUNT)
    batching: str = opt(
        "dynamic", "dynamic, or static: a new batch starts when the last one has ended (for experiments).", "NAME",
        one_of("dynamic", "static"), places=())
    preemption: str = opt(
        "swap", "Keys and values when memory runs out: swap (to the host's memory) or recompute.", "NAME",
        one_of("swap", "recompute"))
    prefix_cache: bool = opt(
        True, "Keep keys and values of finished texts, so that requests that begin alike start sooner.", "", FLAG)
    prefix_disk: int | str | None = opt(
        None, "Bytes on the disk, such as 4GB, in which these survive a restart: written when the model is unloaded.",
        "SIZE", SIZE, shown="nothing is written")


def rows(table: type, place: str = "") -> "Iterator[tuple[Field, OptionFacts]]":
    """Fields of a table and the facts of their options, of one place alone if it is given."""
    for row in fields(table):
        if not place or place in row.metadata["option"].places:
            yield row, row.metadata["option"]


OPTIONS = {found[0].name: found for table in (LoadOptions, EngineOptions) for found in rows(table)}  # of both


def check(options: "LoadOptions | EngineOptions") -> None:
    """Hold every value that is not None against its check.

    Raises:
        RequestError: a value is of another kind, or out of range.
    """
    for row, found in rows(type(options)):
        value = getattr(options, row.name)
        if value is not None or row.default is not None:
            found.check(value, option(row.name))


def changed(options: "LoadOptions | EngineOptions") -> "Mapping[str, Any]":
    """Options that differ from their defaults."""
    return {row.name: value for row in fields(options) if (value := getattr(options, row.name)) != row.default}


def described(table: type) -> "Callable[[Any], Any]":
    """A decorator of what takes the options of a table by name: they stand in its signature, and in its docstring in
    place of {options}."""
    def fill(owner):
        from inspect import Parameter, signature

        own = list(signature(owner).parameters.values())
        names = {parameter.name for parameter in own}
        more = [Parameter(row.name, Parameter.KEYWORD_ONLY, default=row.default, annotation=row.type)
                for row, _ in rows(table) if row.name not in names]
        rest = [own.pop()] if not isinstance(owner, type) else own[len(own):]  # further options, after those
        own = [parameter for parameter in own if parameter.kind is not Parameter.VAR_KEYWORD]
        owner.__signature__ = signature(owner).replace(parameters=[*own, *more, *rest])
        before = owner.__doc__.partition("{options}")[0].rpartition("\n")[2]  # Python 3.13 takes the indentation away
        owner.__doc__ = owner.__doc__.replace("{options}", f"\n{before}".join(_lines(table)))
        return owner

    return fill


def in_shell(name: str, value: str = "") -> str:
    """An option as the shell has it."""
    flag = (name in OPTIONS and OPTIONS[name][1].flag) or f"--{name.replace('_', '-')}"
    plain = value[1:-1] if value[1:-1].replace("-", "").isalnum() else value  # without quotes that nobody needs
    return f"{flag} {plain if value[:1] == chr(39) else value}" if value else flag


def _lines(table: type) -> "Iterator[str]":
    """Options for a docstring: name, help, and the default where the signature does not tell it."""
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
