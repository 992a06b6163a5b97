"""Tree of numflow's errors.

    NumflowError                 base class, for errors that a user can act on: printed as one line, exit code 1
    ├── SpecError                invalid specification file: names file, key and expected value
    ├── FormatError              invalid checkpoint or tokenizer file: names file, field and expected value
    │   └── UnsafePickleError    a pickle that would import or call something
    ├── NetworkError             invalid step of a network: names the step
    ├── TokenizerError           text or a chat template that cannot be converted to tokens
    ├── ModelNotFoundError       unknown model, spec or file
    ├── DownloadError            the download of a model failed, or its hash does not match
    │   └── UnreachableError     there is no network, or the server does not answer
    ├── RequestError             a request that cannot be served (too long, contradictory settings)
    │   ├── NotFiniteError       the model's logits are NaN or infinite
    │   ├── QueueFullError       too many waiting requests: try again later
    │   └── OutOfMemoryError     out of memory at present; also a MemoryError
    └── DeviceError              a missing executor, device or optional package
        ├── DeviceLostError      a device was lost and replaced, without its KV memory
        └── DeviceMemoryError    a device is out of memory; also an OutOfMemoryError
"""

import reprlib
from errno import ENOMEM

BEGIN, EQUALS, END = "\x01", "\x02", "\x03"  # markers of an option in a message


class NumflowError(Exception):
    """Base of all errors with a message for the user, in one line.

    Options in the message (`option`) are spelled as in Python; `spelled` spells them for other interfaces.
    """

    def __str__(self) -> str:
        return self.spelled(in_python)

    def spelled(self, spell) -> str:
        """The message with options spelled by `spell(name, value)`; value "": the name alone. Options for which `spell`
        returns None stay marked, for another spelling."""
        text, *rest = super().__str__().split(BEGIN)
        for part in rest:
            marked, end, more = part.partition(END)
            name, equals, value = marked.partition(EQUALS)
            spelled = spell(name, value) if end and equals else None
            text += f"{BEGIN}{part}" if spelled is None else spelled + more
        return text

    def respell(self, spell) -> None:
        """Replace the options of the message by their spelling."""
        self.args = (self.spelled(spell),)


def option(name: str, value: object = None) -> str:
    """An option, with or without value, for the message of a NumflowError; spelled when the message is shown."""
    return f"{BEGIN}{name}{EQUALS}{'' if value is None else quoted(value)}{END}"


def in_python(name: str, value: str) -> str:
    """Spelling of an option as a Python argument."""
    return f"{name}={value}" if value else name


class SpecError(NumflowError):
    """A specification file is invalid, or its values are inconsistent.

    options: options that the message is about, as "section.key".
    """

    def __init__(self, message: str = "", options: tuple[str, ...] = ()):
        super().__init__(message)
        self.options = options


class FormatError(NumflowError):
    """A checkpoint or tokenizer file is truncated, damaged, inconsistent or not supported."""


class UnsafePickleError(FormatError):
    """A pickle asks for something other than tensors; `requested` lists every such global."""

    def __init__(self, message: str, requested: tuple[str, ...] = ()):
        super().__init__(message)
        self.requested = requested


class NetworkError(NumflowError):
    """The steps of a network are inconsistent; the message names the step, the expected and the found value."""


class TokenizerError(NumflowError):
    """Text, ids or messages that the tokenizer or the chat template cannot process."""


class ModelNotFoundError(NumflowError):
    """There is no model of this name or at this path."""


class DownloadError(NumflowError):
    """A download failed, was interrupted, or has a wrong hash."""


class UnreachableError(DownloadError):
    """There is no network, or the server does not answer."""


class RequestError(NumflowError):
    """A request that cannot be served. code: short name of the reason, for programs. param: name of the wrong
    setting."""

    def __init__(self, message: object = "", code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


class NotFiniteError(RequestError):
    """The model's logits are NaN or infinite. The message names the tensor at fault, if one is found."""


class QueueFullError(RequestError):
    """The engine's queue is full; try the request again later."""


class DeviceError(NumflowError):
    """An executor, device or optional package is missing."""


class DeviceFaultError(DeviceError):
    """A device that cannot run again: its process has died, or a GPU's driver has reported a fault, after which every
    call of this process fails. The model has to be loaded again, after a fault of a GPU in a new process."""


class DeviceLostError(DeviceError):
    """A device was lost during a run and has been replaced: the program can continue, but its KV memory is lost, so
    sequences have to be recomputed from their first token."""


class OutOfMemoryError(RequestError, MemoryError):
    """There is not enough memory at present."""


class DeviceMemoryError(DeviceError, OutOfMemoryError):
    """A device is out of memory."""


def no_memory(error: BaseException) -> bool:
    """Whether an exception means out of memory, from Python, NumPy, the system or a device."""
    return (isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM)
            or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)))


def quoted(value: object, most: int = 100) -> str:
    """A value as shown in messages: only the beginning of a long text, list or map."""
    text = _SHORT.repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _number(value: int, level: int) -> str:
    return repr(value) if abs(value) < 10**50 else f"a number of {value.bit_length()} bits"


def _array(value, level: int) -> str:
    """A NumPy array as a list: its own repr has line breaks."""
    return _SHORT.repr1(value.reshape(-1)[:_SHORT.maxlist + 1].tolist(), level)


_SHORT = reprlib.Repr()  # formats only the part of a value that it shows
_SHORT.repr_int = _number  # type: ignore[method-assign, assignment]  # Python's own refuses long integers
_SHORT.repr_ndarray = _array  # type: ignore[attr-defined]
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 12
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


LISTED = 40  # maximum names that an error lists


def did_you_mean(word: str, known) -> str:
    """Hint to append to a message: `"; did you mean 'x'?"` for the nearest of `known`, else the list of them."""
    known = sorted(str(k) for k in known)
    if near := _nearest(str(word)[:100], known):
        return f"; did you mean {near!r}?"
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return f"; known: {', '.join(known[:LISTED])}{more}" if known else ""


def _nearest(word: str, known: list[str]) -> str:
    """The most similar of `known`; "" if none is similar. As difflib.get_close_matches, but words that cannot be nearer
    than the nearest so far are passed over."""
    from difflib import SequenceMatcher  # only errors need it

    matcher, best = SequenceMatcher(b=word), (0.6, "")
    for each in known:
        matcher.set_seq1(each)
        if matcher.real_quick_ratio() >= best[0] and matcher.quick_ratio() >= best[0]:
            best = max(best, (matcher.ratio(), each))
    return best[1]
