"""Every error numflow raises on purpose, as one tree.

    NumflowError                 a user can act on it: printed as one line, exit code 1
    ├── SpecError                a specification file: names file, key and what was expected
    ├── FormatError              a checkpoint or tokenizer file: names file, field and what was expected
    │   └── UnsafePickleError    a pickle that wants to import or call something
    ├── NetworkError             a step of a network is wrong: names the step
    ├── TokenizerError           text or a chat template that cannot be turned into tokens
    ├── ModelNotFoundError       no model, spec or file of that name
    ├── DownloadError            fetching a model failed, or its bytes are not the expected ones
    │   └── UnreachableError     there is no network, or what models are fetched from does not answer
    ├── RequestError             a request that cannot be served (too long, contradictory settings)
    │   ├── NotFiniteError       the model's logits are NaN or infinite
    │   ├── QueueFullError       too many requests wait already: try again later
    │   └── OutOfMemoryError     memory does not suffice for what is wanted now; also a MemoryError
    └── DeviceError              an executor, a device or an optional package that is not there
        ├── DeviceLostError      a device went away and is back, without the keys and values that it held
        └── DeviceMemoryError    memory of a device does not suffice; also an OutOfMemoryError
"""

import reprlib
from errno import ENOMEM

BEGIN, EQUALS, END = "\x01", "\x02", "\x03"  # marks of an option in a message


class NumflowError(Exception):
    """Base of all errors whose message is meant for the user, complete in one line.

    Options in the message (`option`) are spelled as in Python; `spelled` writes them for other readers.
    """

    def __str__(self) -> str:
        return self.spelled(in_python)

    def spelled(self, spell) -> str:
        """The message with options as `spell(name, value)` writes them; value "" is the name alone, and what it gives
        None for is left to another reader's spelling."""
        text, *rest = super().__str__().split(BEGIN)
        for part in rest:
            marked, end, more = part.partition(END)
            name, equals, value = marked.partition(EQUALS)
            spelled = spell(name, value) if end and equals else None
            text += f"{BEGIN}{part}" if spelled is None else spelled + more
        return text

    def respell(self, spell) -> None:
        """Spell the options of the message for its reader, for good."""
        self.args = (self.spelled(spell),)


def option(name: str, value: object = None) -> str:
    """An option, with its value or alone, for the message of a NumflowError: whoever shows it knows how its reader
    writes options."""
    return f"{BEGIN}{name}{EQUALS}{'' if value is None else quoted(value)}{END}"


def in_python(name: str, value: str) -> str:
    """An option as an argument."""
    return f"{name}={value}" if value else name


class SpecError(NumflowError):
    """A specification file is wrong, or its values do not go together.

    options: those that the message is about, as "section.key".
    """

    def __init__(self, message: str = "", options: tuple[str, ...] = ()):
        super().__init__(message)
        self.options = options


class FormatError(NumflowError):
    """A checkpoint or tokenizer file is truncated, corrupt, lying or not supported."""


class UnsafePickleError(FormatError):
    """A pickle asks for something other than tensors; `requested` lists every such global."""

    def __init__(self, message: str, requested: tuple[str, ...] = ()):
        super().__init__(message)
        self.requested = requested


class NetworkError(NumflowError):
    """A network does not fit together; the message names the step, the expected and the found."""


class TokenizerError(NumflowError):
    """Text, ids or messages that the tokenizer or the chat template cannot handle."""


class ModelNotFoundError(NumflowError):
    """No model of that name or at that path."""


class DownloadError(NumflowError):
    """A download failed, was cut off, or does not have the expected hash."""


class UnreachableError(DownloadError):
    """There is no network, or what models are fetched from does not answer."""


class RequestError(NumflowError):
    """A request that cannot be served as asked. code: a short name of the reason, where programs look for one. param:
    the setting that is wrong."""

    def __init__(self, message: object = "", code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


class NotFiniteError(RequestError):
    """The model's logits are no finite numbers. The message names the tensor that is to blame, where one is."""


class QueueFullError(RequestError):
    """The engine's queue is full; the same request may be taken later."""


class DeviceError(NumflowError):
    """An executor, device or optional package is missing."""


class DeviceFaultError(DeviceError):
    """A device that will never run again: its process has died, or a GPU's driver has reported a fault, after which
    every call of this process fails. The model has to be loaded again, after a GPU's fault by a new process."""


class DeviceLostError(DeviceError):
    """A device went away in the middle of a run and has been replaced: the program can go on, but what was in its KV
    cache is lost, so sequences have to be read again from their first token."""


class OutOfMemoryError(RequestError, MemoryError):
    """Memory does not suffice for what is wanted now."""


class DeviceMemoryError(DeviceError, OutOfMemoryError):
    """A device's memory does not suffice."""


def no_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has run out, as Python, NumPy, the system or a device say it."""
    return (isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM)
            or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)))


def quoted(value: object, most: int = 100) -> str:
    """A given value as messages show it: of a long text, list or map only the beginning."""
    text = _SHORT.repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _number(value: int, level: int) -> str:
    return repr(value) if abs(value) < 10**50 else f"a number of {value.bit_length()} bits"


def _array(value, level: int) -> str:
    """A NumPy array as a list: its own words for one have line ends."""
    return _SHORT.repr1(value.reshape(-1)[:_SHORT.maxlist + 1].tolist(), level)


_SHORT = reprlib.Repr()  # looks at no more of a value than it shows
_SHORT.repr_int = _number  # type: ignore[method-assign, assignment]  # Python's own refuses long ones
_SHORT.repr_ndarray = _array  # type: ignore[attr-defined]
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 12
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


LISTED = 40  # names that an error lists at most


def did_you_mean(word: str, known) -> str:
    """`"; did you mean 'x'?"` for the nearest of `known`, else the list of them, ready to append."""
    from difflib import get_close_matches  # only what fails needs it

    known = sorted(str(k) for k in known)
    near = get_close_matches(str(word)[:100], known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return f"; known: {', '.join(known[:LISTED])}{more}" if known else ""
