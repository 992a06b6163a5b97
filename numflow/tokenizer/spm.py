"""SentencePiece vocabularies by the `sentencepiece` package, and serialisation of its models from a table of tokens."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numflow.errors import FormatError
from numflow.tokenizer.added import AddedTokens
from numflow.tokenizer.pieces import metaspace

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

UNIGRAM, BPE = 1, 2


class SentencePieceVocabulary:
    """SentencePiece vocabulary. The text is split at added tokens first; each part is encoded separately.

    proto:       serialised SentencePiece model.
    added:       tokens matched as whole texts.
    texts:       tokens by id.
    remap:       vocabulary id of each SentencePiece id, if they differ.
    special_ids: special tokens; by default those of `added`.
    prefix_each: whether the dummy prefix space is added to each part, not only to the first.
    strip_first: whether `piece` drops one space at the start of a text.
    """

    def __init__(self, proto: bytes, added: AddedTokens, *, texts: Sequence[str],
                 remap: Sequence[int] | None = None, special_ids: frozenset[int] | None = None, where: str = "",
                 prefix_each: bool = True, strip_first: bool = True, unused: frozenset[int] = frozenset()):
        self.proto, self._where = proto, where
        self._processor = load_proto(proto, where)
        self._prefix_each = prefix_each
        self._unprefixed_lock, self._unprefixed_processor = Lock(), None
        self._added = added
        self._texts, self.unused = texts, unused
        self.remap = remap
        self._ids: dict[str, int] | None = None
        self.added = added.ids
        self.special_ids = added.special_ids if special_ids is None else special_ids
        self._piece = metaspace(strip_first)
        self._whole = self.special_ids.union(added.ids.values())
        self.size = len(self._texts)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for n, part in enumerate(self._added.split(text, parse_special)):
            if isinstance(part, int):
                ids.append(part)
                continue
            found = (self._processor if n == 0 or self._prefix_each else self._unprefixed()).encode(part)
            ids += found if self.remap is None else [self.remap[id] for id in found]
        return ids

    def text(self, token: int) -> str | None:
        return self._texts[token] if 0 <= token < self.size else None

    def id(self, text: str) -> int | None:
        if text in self.added:
            return self.added[text]
        if self._ids is None:
            self._ids = {text: id for id, text in reversed(list(enumerate(self._texts)))}
        return self._ids.get(text)

    def piece(self, token: int, first: bool) -> bytes:
        text = self.text(token)
        if text is None or token in self.unused:
            return b""
        return text.encode("utf-8") if token in self._whole else self._piece(text, first)

    def _unprefixed(self) -> Any:
        """The same model without the dummy prefix space: a later field of a protobuf message overrides an earlier
        one."""
        with self._unprefixed_lock:
            if self._unprefixed_processor is None:
                changed = _message(3, _integer(3, 0))
                self._unprefixed_processor = load_proto(self.proto + changed, self._where)
            return self._unprefixed_processor


def load_proto(proto: bytes, where: str) -> Any:
    """SentencePieceProcessor of a serialised model.

    Raises:
        FormatError: no valid model; the message names the file.
    """
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        loaded = processor.LoadFromSerializedProto(proto)
    except (RuntimeError, OSError, ValueError) as error:  # the message itself may be invalid UTF-8
        raise FormatError(f"{where}: not a SentencePiece model: {' '.join(str(error).split())}") from None
    if not loaded or processor.GetPieceSize() == 0:
        raise FormatError(f"{where}: not a SentencePiece model")
    return processor


def texts_of(processor: Any, where: str) -> list[str]:
    """The tokens of a SentencePieceProcessor, by id. Raises: FormatError: one is not UTF-8."""
    try:
        return processor.IdToPiece(list(range(processor.GetPieceSize())))
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: a token is not valid UTF-8: {error.object!r}") from None


def write_proto(texts: Sequence[str], scores: ArrayLike, types: ArrayLike, kind: int, unk: int,
                add_dummy_prefix: bool, remove_extra_whitespaces: bool, charsmap: bytes = b"") -> bytes:
    """Serialise a SentencePiece model (a protocol buffer, written field by field) from a table of tokens.

    Tokens that the format does not allow (empty, repeated, with a NUL) become unused tokens.
    """
    kinds = np.asarray(types, dtype=np.uint8).copy()
    kinds[kinds == USER_DEFINED] = CONTROL  # matched before, by AddedTokens
    kinds[kinds == UNKNOWN] = CONTROL
    kinds[unk] = UNKNOWN
    tail = np.zeros(len(texts), dtype=[("score_key", "u1"), ("score", "<f4"), ("type_key", "u1"), ("type", "u1")])
    tail["score_key"], tail["score"], tail["type_key"], tail["type"] = 0x15, np.asarray(scores, "<f4"), 0x18, kinds
    byte_fallback = int((kinds == BYTE).sum()) == 256
    if not byte_fallback:
        tail["type"][kinds == BYTE] = UNUSED
    trainer = _integer(3, kind) + _integer(35, byte_fallback) + _integer(40, unk)
    normalizer = _bytes(2, charsmap) + _integer(3, add_dummy_prefix) + _integer(4, remove_extra_whitespaces)
    return _pieces(texts, tail) + _message(2, trainer) + _message(3, normalizer + _integer(5, 1))


def _pieces(texts: Sequence[str], tail: np.ndarray) -> bytes:
    """Field 1, once per token: text (1), score (2), type (3); `tail` has score and type in 7 bytes.

    Records of the same length are written together, for speed: large vocabularies are loaded at every start.
    """
    if len(set(texts)) < len(texts) or "" in texts or "\0" in "".join(texts):
        texts = _made_valid(texts, tail)
    source = np.frombuffer("\0".join([*texts, ""]).encode("utf-8", errors="replace"), np.uint8)
    ends = np.flatnonzero(source == 0)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts
    groups = {int(n): b"\n" + _varint(n + len(_varint(n)) + 8) + b"\n" + _varint(n) for n in np.unique(lengths)}
    sizes = lengths + tail.itemsize
    for n, head in groups.items():
        sizes[lengths == n] += len(head)
    target = np.cumsum(sizes) - sizes
    out = np.empty(sizes.sum(), np.uint8)
    tails = tail.view(np.uint8).reshape(len(texts), -1)
    for n, head in groups.items():
        rows = np.flatnonzero(lengths == n)
        record = np.empty((len(rows), len(head) + n + tail.itemsize), np.uint8)
        record[:, : len(head)] = np.frombuffer(head, np.uint8)
        record[:, len(head) : len(head) + n] = source[starts[rows, None] + np.arange(n)]
        record[:, len(head) + n :] = tails[rows]
        out[target[rows, None] + np.arange(record.shape[1])] = record
    return out.tobytes()


def _made_valid(texts: Sequence[str], tail: np.ndarray) -> list[str]:
    """Texts with tokens that the format does not allow replaced by unused tokens."""
    seen, valid = {""}, []
    for n, text in enumerate(texts):
        if text in seen or "\0" in text:
            text = f"\x01unused{n}"
            tail["type"][n] = UNUSED if tail["type"][n] != UNKNOWN else UNKNOWN
        seen.add(text)
        valid.append(text)
    return valid


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


_message: Callable[[int, bytes], bytes] = _bytes
