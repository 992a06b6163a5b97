"""The interface of executors: Program, a network that can be run, and World, the devices of a plan on one executor.

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
MOST_STEPS = 8  # most steps of one `decode`
Progress = Callable[[str, int, int], None]  # (stage, number done, total)


@dataclass(frozen=True)
class TraceRow:
    """One step of a traced run: index, label, op, shapes, the kernel's file:line, microseconds.

    within: index of the step into whose kernel this step is fused; the time is part of that step's.
    """

    index: int
    label: str
    op: str
    shapes: str
    kernel: str
    microseconds: float
    within: int | None = None


class Quantiser(Protocol):
    """A `quant.RowsOf` that occupies a device from its first call until `close`."""

    def __call__(self, x: np.ndarray, scheme: RowScheme, importance: np.ndarray | None, name: str) -> np.ndarray:
        """Quantised rows of a matrix, as a quant.RowsOf."""

    def close(self) -> None:
        """Release the device; a later call opens it again."""


class Program(Protocol):
    """A network bound to memory and kernels, on one device, or on several devices of a plan.

    network:     the network, for callers to read.
    block_size:  tokens per KV block.
    activations: "int8", "int16", "auto", "bf16", "fp8", "nvfp4" or "f32": the arithmetic of products with matrices.
    threads:     number of computing threads of all devices; None if the executor does not control it.
    compile_s:   seconds of compiling kernels while the program was made.
    can:         optional methods that are implemented: SAMPLE (`sample`), DECODE (`decode`), TRACE (`trace`), WALK
                 (`walk`), PROFILE (`weight_bytes`, `arithmetic`, `groups`), ADAPT (`set_adapter`).

    KV blocks are managed by window: layers whose attention sees `window` tokens back have block ids of their own;
    window 0 is for layers that see the whole sequence (network/windows.py). The states of recurrent steps are in slots,
    one per sequence; STATE takes the place of a window for them.
    """

    network: Network
    block_size: int
    activations: str
    threads: int | None
    compile_s: float = 0.0
    can: frozenset[str] = frozenset()

    @classmethod
    def quantiser(cls, gpu: Any = "auto", device: int = 0) -> "Quantiser | None":
        """A Quantiser that runs on the executor's device; None if weights are quantised on the CPU. gpu: as the
        program's option of this name. The device is opened by the first call."""
        return None

    @property
    def failure(self) -> str:
        """Reason why the program cannot run any more; "" if it can."""
        return ""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in memory."""

    @property
    def kv_bytes(self) -> int:
        """Reserved bytes of keys, values and states."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one self-attention KV block, all layers."""

    @property
    def window_bytes(self) -> Mapping[int, int]:
        """By window, bytes of one KV block of the layers with this window; for STATE, bytes of a slot."""

    @property
    def cross_block_bytes(self) -> int:
        """Bytes of one block of encoder memory, all layers."""

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Reserve KV blocks and blocks of encoder memory; blocks that remain keep their content.

        windows: number of blocks by window where it differs from `blocks`, and number of slots for STATE.
        """

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy self-attention KV blocks of all layers, or of layers with a window, or slots (STATE); no target is a
        source.

        Raises:
            RequestError: not as many targets as sources, or no such block.
        """

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """Content of self-attention KV blocks, uint8 [n, bytes of a block], of all layers or of layers with a window.

        Raises:
            RequestError: no such block.
        """

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Load content that `save_blocks` returned into blocks, the same or others.

        Raises:
            RequestError: no such block, or data of another shape.
        """

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits",
            wanted: bool = True) -> np.ndarray | None:
        """Run `entry` on the batch, up to the step that completes `output`; all steps if that is None.

        wanted: False on a device of a plan whose output another device returns.

        Returns:
            float32 [R, width of the output], a copy; None if `output` is None or not wanted.

        Raises:
            RequestError: no such entry or output, or an id or a position of the batch is out of range.
        """

    def result(self, output: str) -> np.ndarray:
        """Another output of the latest run, float32 [T or R, width], a copy."""
        raise RequestError("this backend hands out one output of a run only")

    def sample(self, batch: Batch, choices: Sequence[Choice], entry: str = "main") -> np.ndarray:
        """A token for each of the R wanted rows, int32 [R], sampled from its logits by its Choice: the token that
        `Sampler.pick` picks from the same logits, -1 if logits are not finite. Only ids are copied from the device.

        Raises:
            RequestError: as `run`, or there are not as many choices as rows.
        """
        raise RequestError("this backend does not pick tokens")

    def decode(self, batch: Batch, steps: int, choices: Sequence[Choice] | None = None,
               entry: str = "main") -> np.ndarray:
        """Run several decoding steps: each step takes the tokens of the step before, one position later.

        choices: sampling of each row, as in `sample`; None: greedy for all rows.

        The batch has one token of each sequence, whose row is wanted. Afterwards it is the batch of the last step
        (Batch.go_on). Only the first step may begin a KV block. Returns the tokens of every step, int32 [steps, B]; -1
        if logits are not finite, and undefined tokens of that sequence after it.

        Raises:
            RequestError: as `run`; another kind of batch; more than MOST_STEPS steps; not as many choices as rows, or
                not as many random numbers as steps.
        """
        raise RequestError("this backend runs one step at a time")

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """Run all steps of the entry; one TraceRow per step."""
        raise RequestError("this backend has no trace")

    def walk(self, batch: Batch, entry: str = "main", first: int = 0,
             given: tuple[View, np.ndarray] | None = None) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Run the steps of the entry from step `first` on, one by one: (index, copies of its outputs) for each.

        Steps that are fused into another step, so that their results are never in memory, are left out.
        given: a view, and the content of its rows before step `first`.
        """
        raise RequestError("this backend shows no values")

    def weight_bytes(self, name: str) -> int:
        """Bytes of a weight in memory."""
        raise RequestError("this backend has no profile")

    def arithmetic(self, step: Step) -> str:
        """Type of a step's products: "int8", "bf16" (pairs) or "f32"."""
        raise RequestError("this backend has no profile")

    def groups(self, entry: str = "main") -> tuple[Group, ...]:
        """The groups of fused steps of an entry.

        Raises:
            RequestError: no such entry, or the backend does not support it.
        """
        raise RequestError("this backend has no profile")

    @property
    def shares(self) -> Sequence[Network]:
        """Of a plan, the networks of its devices, to whose steps adapters apply; else empty."""
        return ()

    def set_adapter(self, number: int, parts: AdaptedParts | None) -> None:
        """Set all matrices of adapter `number` (0, 1, ...) of Batch.adapters, by the `part` of steps (ops.ADAPTING);
        None removes the adapter.

        Raises:
            RequestError: the backend does not support adapters by sequence.
        """
        raise RequestError("this backend has no adapters beside one another")

    def close(self) -> None:
        """Free weights, caches and scratch memory; the program cannot run any more. May be called twice."""


@runtime_checkable
class World(Protocol):
    """The devices of a plan that one executor runs, and how they exchange values; made as World(networks by device,
    threads of each, whether devices are processes, mailboxes to remote devices, names=names by device).

    threads:   threads of each device, None if the executor does not control them.
    in_pieces: whether a long batch may be run in pieces.
    """

    threads: Mapping[int, int | None]
    in_pieces: ClassVar[bool]

    @property
    def progress(self) -> int:
        """A count that grows as long as devices make progress."""

    def together(self, network: Network, programs: Sequence[Any]) -> Any | None:
        """An object whose `run(batch, entry, outputs)` runs the programs of all devices, parts of `network`, in one
        call; None if each device must be called separately."""
        return None

    def abort(self) -> None:
        """Abort the run: waiting devices raise a DeviceError."""

    def reset(self) -> None:
        """Reset after an abort; all devices must be idle."""

    def close(self) -> None:
        """Free all resources; may be called twice."""
