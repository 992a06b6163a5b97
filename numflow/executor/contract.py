"""The contract between whoever runs a network and whoever asks for it: Program, and World where devices meet.

T, R as in ops.py: rows of a batch, and rows whose results are wanted. n: blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from numflow.decoding.choice import Choice
from numflow.errors import RequestError
from numflow.network.adapters.parts import AdaptedParts
from numflow.network.passes.grouping import Group
from numflow.ops import Batch, Network, Step, View
from numflow.quant.layout import RowScheme

SAMPLE, DECODE, TRACE, WALK, PROFILE, ADAPT = "sample", "decode", "trace", "walk", "profile", "adapt"
MOST_STEPS = 8  # of `decode`
Progress = Callable[[str, int, int], None]  # (what is made, how many are done, of how many)


@dataclass(frozen=True)
class TraceRow:
    """One step of a traced run: its place, what ran on which shapes, the kernel's file:line, microseconds; within:
    index of the step whose kernel does this one as well, in that one's time.
    """

    index: int
    label: str
    op: str
    shapes: str
    kernel: str
    microseconds: float
    within: int | None = None


class Quantiser(Protocol):
    """A `quant.RowsOf` that holds a device between its first call and `close`."""

    def __call__(self, x: np.ndarray, scheme: RowScheme, importance: np.ndarray | None, name: str) -> np.ndarray:
        """Rows of a matrix, as a quant.RowsOf."""

    def close(self) -> None:
        """Give the device back; a later call takes it again."""


class Program(Protocol):
    """A network bound to memory and kernels: of an executor on one device, or of a plan on several.

    network:     its steps, for callers to read.
    block_size:  tokens of a KV block.
    activations: "int8", "int16", "auto", "bf16", "fp8", "nvfp4" or "f32": the arithmetic of matrices.
    threads:     threads that compute, of all devices; None where there is no say in it.
    compile_s:   seconds that kernels took to compile while the program was made.
    can:         optional methods that it has: SAMPLE (`sample`), DECODE (`decode`), TRACE (`trace`), WALK (`walk`),
                 PROFILE (`weight_bytes`, `arithmetic`, `groups`), ADAPT (`set_adapter`).

    Keys and values lie in blocks by window: layers whose attention sees `window` tokens back have block ids of their
    own, 0 stands for layers that see the whole text (network/windows.py). The states of recurrent steps lie in slots,
    one for each sequence: memory of the kind STATE, which stands where a window does.
    """

    network: Network
    block_size: int
    activations: str
    threads: int | None
    compile_s: float = 0.0
    can: frozenset[str] = frozenset()

    @classmethod
    def quantiser(cls, gpu: Any = "auto", device: int = 0) -> "Quantiser | None":
        """The search of a device for what weights are quantised to; None where the processors do that. gpu: as the
        program's option of this name. Nothing is opened before the first call."""
        return None

    @property
    def failure(self) -> str:
        """Reason why nothing can run here any more; "" if all is well."""
        return ""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in memory."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are reserved, and of states."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one self-attention KV block, all layers."""

    @property
    def window_bytes(self) -> Mapping[int, int]:
        """Bytes of one KV block of the layers with each window, and of a slot of STATE."""

    @property
    def cross_block_bytes(self) -> int:
        """Bytes of one block of encoder memory, all layers."""

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Hold this many KV blocks (and blocks of encoder memory), keeping the content of those that remain.

        windows: others than `blocks`, for the layers with these windows, and the slots of STATE.
        """

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy self-attention KV blocks, all layers or those with a window, or slots (STATE); no target is a source.

        Raises:
            RequestError: not as many targets as sources, or no such block.
        """

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """Content of self-attention KV blocks, uint8 [n, bytes of a block], all layers or those with a window.

        Raises:
            RequestError: no such block.
        """

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Put what `save_blocks` returned into blocks, the same or others.

        Raises:
            RequestError: no such block, or data of another shape.
        """

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits",
            wanted: bool = True) -> np.ndarray | None:
        """Run `entry` on the batch, up to the step that completes `output`; all steps if that is None.

        wanted: False on a device of a plan whose output another one hands out.

        Returns:
            float32 [R, width of the output], the caller's own; None if `output` is None or not wanted.

        Raises:
            RequestError: no such entry or output, or an id or a position of the batch is out of range.
        """

    def result(self, output: str) -> np.ndarray:
        """Another output that the latest run has computed, float32 [T or R, width], the caller's own."""
        raise RequestError("this backend hands out one output of a run only")

    def sample(self, batch: Batch, choices: Sequence[Choice], entry: str = "main") -> np.ndarray:
        """A token for each of the R wanted rows, int32 [R], picked from its logits as its choice says: the one that
        `Sampler.pick` takes of the same logits, -1 where they are not finite. Only these come back from the device.

        Raises:
            RequestError: as `run`, or there are not as many choices as rows.
        """
        raise RequestError("this backend does not pick tokens")

    def decode(self, batch: Batch, steps: int, choices: Sequence[Choice] | None = None,
               entry: str = "main") -> np.ndarray:
        """Several steps one after the other: each takes the tokens picked in the one before, one position later.

        choices: how they are picked, of each row, as in `sample`; None: the likeliest of all rows.

        The batch has one token of each sequence, whose row is wanted; it has gone on to the last step afterwards
        (Batch.go_on). No step but the first may begin a KV block. Returns the tokens of every step, int32 [steps, B];
        -1 where logits are not finite, after which that sequence's tokens mean nothing.

        Raises:
            RequestError: as `run`, the batch is not such a one, or there are more than MOST_STEPS, not as many choices
                as rows, or not as many random numbers as steps.
        """
        raise RequestError("this backend runs one step at a time")

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """The same run, all steps of the entry; one TraceRow for each."""
        raise RequestError("this backend has no trace")

    def walk(self, batch: Batch, entry: str = "main", first: int = 0,
             given: tuple[View, np.ndarray] | None = None) -> Iterator[tuple[int, list[np.ndarray]]]:
        """The same run from step `first` on, all steps of the entry: (index, its outputs) for each, copies.

        Steps whose results never lie in memory, because another one's kernels do them as well, are left out.
        given: a view and what its rows hold when the walk begins.
        """
        raise RequestError("this backend shows no values")

    def weight_bytes(self, name: str) -> int:
        """Bytes of a weight in memory."""
        raise RequestError("this backend has no profile")

    def arithmetic(self, step: Step) -> str:
        """The numbers that a step multiplies: "int8", "bf16" (pairs of them) or "f32"."""
        raise RequestError("this backend has no profile")

    def groups(self, entry: str = "main") -> tuple[Group, ...]:
        """The steps of an entry that kernels do together.

        Raises:
            RequestError: no such entry, or this backend cannot tell.
        """
        raise RequestError("this backend has no profile")

    @property
    def shares(self) -> Sequence[Network]:
        """Of a plan, the networks that its devices run, whose steps adapters are for; else none."""
        return ()

    def set_adapter(self, number: int, parts: AdaptedParts | None) -> None:
        """Let adapter `number` (0, 1, ...) of Batch.adapters have these matrices in place of all that it had, by the
        `part` of steps (ops.ADAPTING); None: none.

        Raises:
            RequestError: this backend has no adapters beside one another.
        """
        raise RequestError("this backend has no adapters beside one another")

    def close(self) -> None:
        """Drop weights, caches and scratch memory; the program cannot run any more. May be called twice."""


@runtime_checkable
class World(Protocol):
    """Meeting point of those devices of a plan that one executor runs; made as World(networks by device, threads of
    each, whether devices are processes, mailboxes to devices elsewhere, names=names by device).

    threads:   of each device, None where the executor has no say in it.
    in_pieces: whether a long batch may go through in pieces.
    """

    threads: Mapping[int, int | None]
    in_pieces: ClassVar[bool]

    @property
    def progress(self) -> int:
        """Grows as long as devices get on."""

    def together(self, network: Network, programs: Sequence[Any]) -> Any | None:
        """Runs the programs of all devices, parts of `network`, by one call of its `run(batch, entry, outputs)`; None
        where each device has to be called by itself."""
        return None

    def abort(self) -> None:
        """Let nobody wait any more: whoever does gets a DeviceError."""

    def reset(self) -> None:
        """As new; all devices must be at rest."""

    def close(self) -> None:
        """Give everything back; may be called twice."""
