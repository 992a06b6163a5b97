"""A view of a checkpoint as a GGUF checkpoint: GGUF tensor names, splits and row orders, and metadata.

    seen = as_gguf(checkpoint)      # a Checkpoint of naming "gguf"; weights are read lazily

No model family is named here. The spec's GGUF tables are used in reverse: the network of the future GGUF file is built,
with placeholder tensors created on request (invent.py). Then this network is compared with the source's network, step
by step (match.py), which determines the source of each row and verifies that nothing else differs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numflow import network
from numflow.errors import NetworkError, RequestError, SpecError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES
from numflow.network.build.draft import further_block
from numflow.network.build.stack import decoder_or_encoder, encoder_and_decoder
from numflow.network.gguf.invent import Inventor, NamesToBe
from numflow.network.gguf.match import CLOSE, Mismatch, WeightPair, matched
from numflow.network.gguf.metadata import metadata_of
from numflow.network.quantise.quantise import SMALLEST, matrices
from numflow.network.weights.source import WeightSource
from numflow.ops import Network, Part, Weight
from numflow.spec.paths import specs_dir
from numflow.spec.reader import Spec, load_spec
from numflow.spec.resolve import Resolved

_KEPT = ("F32", "F16", "BF16")
_INSTEAD = "a target that ends in .safetensors stores the whole model"


def as_gguf(checkpoint: Checkpoint, spec: Spec) -> Checkpoint:
    """The checkpoint with GGUF names and row orders, without a tokenizer.

    Matrices that may be quantised are F32, F16 or BF16, as in the source; everything else is F32.

    Raises:
        RequestError: GGUF has no architecture for the family, or cannot express something of this model.
        SpecError, NetworkError: the source is no known model.
    """
    family = _family(spec)
    if family is None:
        raise RequestError(f"{checkpoint.path}: no architecture of GGUF files is known for spec {spec.name!r} "
                           f"([detect] gguf, [gguf.tensors]); {_INSTEAD}")
    architecture = family.section("detect")["gguf"]
    architecture = architecture if isinstance(architecture, str) else architecture[0]
    writing = _Writing(checkpoint, spec, family, architecture)
    try:
        return writing.checkpoint()
    except (Mismatch, SpecError, NetworkError) as error:  # of the future file
        raise RequestError(f"{checkpoint.path}: a GGUF file of architecture {architecture!r} cannot express this "
                           f"model: {error}; {_INSTEAD}") from None


def _family(spec: Spec) -> Spec | None:
    """The spec in the chain that detects GGUF files; the shipped version, if the model has a copy."""
    paths = (shipped if (shipped := specs_dir() / path.name).is_file() else path for path in spec.chain)
    stated = (found for path in paths if (found := load_spec(path, spec.enclosed)).section("detect")
              and not found.section("extends_part"))
    family = next(stated, None)
    return family if family is not None and family.section("detect").get("gguf") else None


@dataclass(frozen=True)
class _Piece:
    """Rows of a future tensor: `part` of the target's weight, filled from the source's weight."""

    weight: Weight
    part: Part
    first: int
    pair: WeightPair
    source: WeightSource

    def is_all_of(self, tensor: Tensor) -> bool:
        """Whether the tensor is the complete weight."""
        return (len(self.weight.parts) == 1 and self.part.rows is None and not self.part.transpose
                and np.prod(self.weight.shape) == np.prod(tensor.shape))


class _Writing:
    """Conversion of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, spec: Spec, family: Spec, architecture: str):
        self.source, self.family = checkpoint, family
        self.network = network.build(spec, checkpoint, fuse=False)
        self.block = network.further(spec, checkpoint, self.network)
        if "labels" in self.network.facts:
            raise RequestError(f"{checkpoint.path}: no GGUF files of classifiers are written; {_INSTEAD}")
        self.resolved, self.names = network.resolve(spec, checkpoint)
        layers = self.network.facts["layers"]
        self.metadata = metadata_of(family, architecture, self.resolved, layers, 0 if self.block is None else 1)
        self.metadata[f"{architecture}.vocab_size"] = self.network.facts["vocabulary"]
        self._last: dict[str, np.ndarray] = {}  # the last read tensor, because readers read it several times
        self.literals = self._factors()

    def checkpoint(self) -> Checkpoint:
        target = self._built()
        matched(self.network, target, divided=True)
        if divisors := self._divisors(target):
            self.literals |= divisors
            target = self._built()
        matches = [(self.network, target, matched(self.network, target))]
        if self.block is not None:
            block = network.build_draft(self.chosen, self.invented, target, fuse=False)
            matches.append((self.block, block, matched(self.block, block)))
        return self._filled(self.invented, matches)

    def _built(self) -> Network:
        """The network of the future file, with placeholder tensors, including those of an MTP block."""
        made = dict(self.literals)
        empty = Checkpoint(self.source.path, "gguf", "gguf", made, self.metadata, {})
        names = NamesToBe(self.family, empty, self.names, self.resolved)
        resolved = Resolved(self.family, empty.config, "gguf", names.has)
        (encoder_and_decoder if self.family.type == "encoder-decoder" else decoder_or_encoder)(
            Inventor(resolved, names, empty, made))
        if self.block is not None:
            further_block(Inventor(resolved, names, empty, made))
        self.invented = empty
        # The spec that detection will choose for the file.
        self.chosen = network.choose_spec(empty)
        if self.chosen.name != self.family.name:
            raise RequestError(f"{self.source.path}: as GGUF it would be taken for {self.chosen.name!r}; {_INSTEAD}")
        return network.build(self.chosen, empty, fuse=False)

    def _divisors(self, target: Network) -> dict[str, Tensor]:
        """A tensor of divisors between rotary frequencies computed from GGUF metadata and those of the model.

        Padded with ones, if other layers rotate more columns.
        """
        found, most = None, 0
        for ours, other in zip(self.network.entries["main"], target.entries["main"], strict=True):
            if ours.op == "rope_angles":
                most = max(most, ours.outputs[0].width // 2)
            if ours.op == "rope_angles" and found is None:
                a = np.asarray(self.network.weights[ours.weights["inv_freq"]].constant, np.float64)
                b = np.asarray(target.weights[other.weights["inv_freq"]].constant, np.float64)
                if not a.all():  # frequency 0 has no divisor
                    continue
                found = None if np.allclose(a, b, CLOSE, 0) else b / a
        if found is None:
            return {}
        name = self._written("rope_freqs")
        if name is None:
            raise Mismatch("model", "a rotary frequency", "what the source says", "another number")
        return {name: _literal(name, np.concatenate([found, np.ones(most - len(found))]))}

    def _factors(self) -> dict[str, Tensor]:
        """longrope divisors of the configuration as tensors, for GGUF architectures that store them."""
        if self.resolved.option("rope", "scaling", 0) != "longrope":
            return {}
        sides = {side: self._written(f"rope_factors_{side}") for side in ("short", "long")}
        return {name: _literal(name, self.resolved.option("rope", f"{side}_factor", 0))
                for side, name in sides.items() if name is not None}

    def _written(self, module: str) -> str | None:
        """Name of a tensor that only some architectures use ([gguf.written]); None for others."""
        text = self.family.section("gguf").get("written", {}).get(module)
        name = None if text is None else self.resolved.evaluate(f"gguf.written.{module}", text)
        return None if name is None else f"{name}.weight"

    def _filled(self, invented: Checkpoint, matches: list[tuple[Network, Network, list[WeightPair]]]) -> Checkpoint:
        """The checkpoint with filled tensors. matches: (source network, target network, pairs of weights)."""
        pieces: dict[str, list[_Piece]] = {}
        for ours, target, pairs in matches:
            source = WeightSource(ours, self.source)
            for pair in pairs:
                for piece in _pieces(invented, target.weights[pair.target], pair, source):
                    collected = pieces.setdefault(piece.part.tensor, [])
                    if not collected or collected[0].source is source:  # tensors shared with an MTP block are complete
                        collected.append(piece)
        large = {name for _, target, _ in matches for name in matrices(target)
                 if np.prod(invented.tensors[name].shape) >= SMALLEST}
        tensors = {name: self._tensor(tensor, pieces[name], name in large)
                   if name in pieces and name not in self.literals else tensor
                   for name, tensor in invented.tensors.items()}
        return replace(invented, tensors=tensors, files={"weights": self.source.files.get("weights", [])})

    def _tensor(self, tensor: Tensor, pieces: list[_Piece], large: bool) -> Tensor:
        """A filled tensor. large: a matrix that keeps its float type; others are F32."""
        kinds = {kind for piece in pieces for kind in piece.source.network.weights[piece.pair.source].types}
        plain = large and len(kinds) == 1 and kinds <= set(_KEPT)
        kind = TYPES[kinds.pop() if plain else "F32"]

        def read() -> np.ndarray:
            if tensor.name not in self._last:
                self._last.clear()
                self._last[tensor.name] = _stored(self._values(tensor, pieces), kind.name)
            return self._last[tensor.name]

        return replace(tensor, type=kind, read=read, ordered=None)

    def _values(self, tensor: Tensor, pieces: list[_Piece]) -> np.ndarray:
        """Values of a tensor, float32 [rows, columns]."""
        shape = (tensor.rows, tensor.columns)
        if len(pieces) == 1 and pieces[0].is_all_of(tensor):
            return self._of_source(pieces[0]).reshape(shape)
        whole = np.empty(tensor.shape, np.float32)
        for piece in pieces:
            _put(whole, piece, self._of_source(piece))
        return whole.reshape(shape)

    def _of_source(self, piece: _Piece) -> np.ndarray:
        """Source values for a weight of the target, in the target's order."""
        values = piece.source.f32(piece.pair.source)
        if piece.pair.order is not None:
            values = values[piece.pair.order]
        if piece.pair.columns is not None:
            values = values[:, piece.pair.columns]
        return values - np.float32(piece.weight.add) if piece.weight.add else values


def _pieces(invented: Checkpoint, weight: Weight, pair: WeightPair, source: WeightSource) -> Iterator[_Piece]:
    """The pieces of a target weight: parts with their first row in the weight."""
    first = 0
    for part in weight.parts:
        tensor = invented.tensors[part.tensor]
        count = tensor.rows * tensor.columns if len(weight.shape) == 1 else tensor.rows
        if part.transpose:
            count = tensor.rows * tensor.columns // weight.shape[1]
        yield _Piece(weight, part, first, pair, source)
        first += tensor.columns if part.turned else count if part.rows is None else len(part.rows)


def _put(whole: np.ndarray, piece: _Piece, values: np.ndarray) -> None:
    """Write the rows of a piece to their position in the tensor."""
    part, first = piece.part, piece.first
    if part.transpose:
        turned = np.swapaxes(whole, -1, -2)
        if part.rows is not None:
            raise RequestError(f"{part.tensor}: some rows of transposed matrices cannot be written")
        turned[...] = values[first:first + turned[..., 0].size].reshape(turned.shape)
        return
    rows = whole.reshape(-1) if len(piece.weight.shape) == 1 else whole.reshape(-1, whole.shape[-1])
    where = slice(None) if part.rows is None else np.asarray(part.rows)
    if part.turned:
        rows[where] = values[first:first + whole.shape[-1]].T
        return
    rows[where] = values[first:first + (len(rows) if part.rows is None else len(part.rows))]


def _stored(x: np.ndarray, kind: str) -> np.ndarray:
    """Convert to a float type, uint8 [rows, row_bytes]; exact for values of this type."""
    if kind == "BF16":
        return np.ascontiguousarray((x.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    return np.ascontiguousarray(x.astype({"F16": np.float16, "F32": np.float32}[kind])).view(np.uint8)


def _literal(name: str, values: Any) -> Tensor:
    array = np.asarray(values, np.float32).reshape(1, -1)
    return Tensor(name, (array.size,), TYPES["F32"], lambda: array.view(np.uint8))
