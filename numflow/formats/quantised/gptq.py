"""GPTQ and AWQ: NAME.qweight, qzeros and scales, codes packed in words of 32 bits.

GPTQ packs codes along the inputs, qweight [K / p, N], and zero points along the outputs, qzeros [groups, N / p]. scales
are [groups, N]. g_idx [K] is the group of each input, in any order ("act-order"). Stored zero points are one less than
the zero points, except in gptq_v2 and gptq_p. (GPTQModel subtracts 1 from each field of a word, so that a zero point of
0 borrows from the next field.) gptq_p stores codes of 3, 5, 6 and 7 bits in bit planes. In an embedding table, the
inputs are tokens, so tokens share scales.

AWQ packs both along the outputs, qweight [K, N / 8], with a permuted column order in each word. Its version "gemv"
packs along the inputs, in order: qweight [N, K / 8], qzeros [N, W] and scales [N, 8 W], with unused groups at the end.
"gemv_fast" packs four rows in words of 16 bits, qweight [N / 4, K], with qzeros = -zero * scale in the type and shape
of scales, [8 W, N]. K is a whole number of groups; with GPTQ, the last group may be short.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.coded import CodedMatrix, CodedRows, zeros_of
from numflow.formats.quantised.parts import SCALES, WORDS, StoredParts, integers, some_scales
from numflow.formats.quantised.words import of_bits, unpacked, unpacked_planes, unpacked_stream

_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # column, of 8, in nibble i of a word
# Column, of 32, of code i in a row: pairs from four groups of eight columns, then even before odd within eight codes.
_FAST_ORDER = np.arange(32).reshape(4, 4, 2).transpose(1, 0, 2).reshape(4, 4, 2).transpose(0, 2, 1).reshape(-1)
_FAST_STEP = 64  # contiguous columns of a row, followed by those of the next of four rows
_BITS = (2, 3, 4, 5, 6, 7, 8)
_TABLES = ("embed_tokens", "word_embeddings", "wte", "tok_embeddings", "embed_in")  # embedding tables


def gptq_or_awq(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.qweight.

    Raises:
        FormatError: a tensor is missing, or types and shapes do not fit.
    """
    stem = name.removesuffix(".qweight")
    words = parts.need(name, ("I16",) if parts.method.layout == "gemv_fast" else WORDS, beside=name)
    scales = parts.need(f"{stem}.scales", SCALES, beside=name)
    if len(words.shape) != 2 or len(scales.shape) != 2 or not scales.rows:
        raise parts.fail(name, f"is {words.type.name} {show(list(words.shape))} with scales "
                               f"{show(list(scales.shape))}; both should have two dimensions")
    method = parts.method
    _drop_bias(parts, f"{stem}.bias", words.rows if method.layout == "gemv" else scales.columns)
    by_shape = words.columns * 8 == scales.columns and f"{stem}.g_idx" not in parts.tensors
    if method.layout == "gemv_fast":
        return _gemv_fast(parts, stem, words, scales)
    if method.layout == "gemv":
        return _gemv(parts, stem, words, scales)
    read, outputs = ((_awq, 8 * words.columns) if method.layout == "gemm" or (by_shape and not method.stated)
                     else (_gptq, words.columns))
    if scales.columns != outputs:
        raise parts.fail(scales.name, f"is {scales.type.name} {list(scales.shape)}, expected {[scales.rows, outputs]}, "
                                      f"as qweight is {list(words.shape)}")
    return read(parts, stem, words, scales)


def _drop_bias(parts: StoredParts, name: str, outputs: int) -> None:
    """Ignore a bias of zeros, which early writers stored for layers without bias."""
    bias = parts.tensors.get(name)
    if bias is not None and bias.shape == (outputs,) and bias.type.name in SCALES and not bias.raw().any():
        parts.used.add(name)


def _gptq(parts: StoredParts, stem: str, words: Tensor, scales: Tensor) -> CodedMatrix:
    stored = _Gptq.of(parts, stem, words, scales)
    bits, n, k, kind, in_order = stored.bits, scales.columns, stored.k, scales.type.name, stored.in_order
    if stem.rpartition(".")[2] in _TABLES:
        return CodedMatrix(f"{stem}.weight", (k, n), stored.tokens, bits, kind, 1, sources=(words,))
    matrix = CodedMatrix(f"{stem}.weight", (n, k), stored.rows, bits, kind, stored.each, turned=True, sources=(words,),
                         zero_type="U8" if bits < 8 or not stored.one else kind)  # of 8 bits up to 256
    return matrix if in_order else replace(matrix, group=1, order=stored.order)


@dataclass(frozen=True)
class _Gptq:
    """The four tensors of a matrix and their layout.

    k:       inputs. size: inputs per group.
    one:     1 is added to stored zero points. borrows: 1 is added to packed words, with carries between fields.
    planes:  codes of 3, 5, 6 and 7 bits are in bit planes.
    """

    parts: StoredParts
    words: Tensor
    scales: Tensor
    zeros: Tensor
    index: Tensor | None
    bits: int
    k: int
    size: int
    one: bool
    borrows: bool
    planes: bool

    @classmethod
    def of(cls, parts: StoredParts, stem: str, words: Tensor, scales: Tensor) -> "_Gptq":
        """Find and check the tensors of a matrix."""
        groups, n = scales.shape
        zeros = parts.need(f"{stem}.qzeros", WORDS, beside=words.name)
        index = parts.get(f"{stem}.g_idx")
        if index is None and parts.method.by_index and groups > 1:
            parts.need(f"{stem}.g_idx", ("I32", "I64"), beside=words.name)
        bits, k = _size(parts, words, zeros, index, groups, n)
        size = _group_size(parts, scales, groups, k)
        layout, borrows = parts.method.layout, parts.method.borrows
        if layout == "gptq_p" and bits not in (2, 4, 8) and (k % 32 or n % 32):
            raise parts.fail(words.name, f"holds {k} x {n} codes of {bits} bits in planes, which are of 32 each")
        return cls(parts, words, scales, zeros, index, bits, k, size, layout == "gptq" and not borrows, borrows,
                   layout == "gptq_p")

    @property
    def each(self) -> int:
        """Inputs per block of equal scales: less than a group if the last group is short."""
        return math.gcd(self.size, self.k)

    @cached_property
    def in_order(self) -> bool:
        """Whether groups are contiguous."""
        return self.index is None or bool((self.order() == np.arange(self.k) // self.size).all())

    def order(self) -> np.ndarray:
        """The group of each input."""
        assert self.index is not None
        found, groups = integers(self.index), self.scales.rows
        if found.size and (int(found.min()) < 0 or int(found.max()) >= groups):
            raise self.parts.fail(self.index.name, f"has groups {int(found.min())} .. {int(found.max())}, expected "
                                                   f"0 .. {groups - 1}, as scales {list(self.scales.shape)} have")
        return found

    def rows(self, begin: int, end: int) -> CodedRows:
        """Rows (outputs) begin .. end of a linear layer."""
        some = np.ascontiguousarray(integers(self.words)[:, begin:end].T)
        first, cut = _cut(begin, end, self.bits, self._dense_zeros)
        zeros = self._points(integers(self.zeros)[:, cut], end - first)[:, begin - first:] + np.float32(self.one)
        return CodedRows(self._codes(some, self.k), self._by_group(
            some_scales(self.scales, slice(None), slice(begin, end))), self._by_group(zeros))

    def tokens(self, begin: int, end: int) -> CodedRows:
        """Rows (tokens) begin .. end of an embedding table."""
        group = np.arange(begin, end) // self.size if self.index is None else self.order()[begin:end]
        first, cut = _cut(begin, end, self.bits, self._dense_codes)
        codes = self._codes(np.ascontiguousarray(integers(self.words)[cut].T), end - first)[:, begin - first:]
        zeros = self._points(integers(self.zeros)[group], self.scales.columns).astype(np.float32)
        return CodedRows(np.ascontiguousarray(codes.T), some_scales(self.scales, group), zeros + np.float32(self.one))

    def _by_group(self, values: np.ndarray) -> np.ndarray:
        """Values [groups, n] transposed to float32 [n, groups], repeated for blocks if the last group is short."""
        found = np.ascontiguousarray(values.T, np.float32)
        cut = self.in_order and self.k % self.size
        return found[:, np.arange(self.k // self.each) * self.each // self.size] if cut else found

    @property
    def _dense_codes(self) -> bool:
        return self.words.rows * 32 == self.k * self.bits

    @property
    def _dense_zeros(self) -> bool:
        return self.zeros.columns * 32 == self.scales.columns * self.bits

    def _codes(self, stored: np.ndarray, count: int) -> np.ndarray:
        """Unpack codes u8 [rows, count] from words [rows, W]."""
        return self._unpack(stored, count, self._dense_codes)

    def _points(self, stored: np.ndarray, count: int) -> np.ndarray:
        """Unpack zero points u8 [groups, count] from words."""
        stored, bits = stored.view(np.uint32), self.bits
        if self.borrows and 32 % bits == 0:
            stored = stored + np.uint32(0xFFFFFFFF // ((1 << bits) - 1))  # 1 in each field
        packed = self._unpack(stored, count, self._dense_zeros)
        if self.borrows and 32 % bits:
            packed = packed + np.uint8(1) & np.uint8((1 << bits) - 1)
        return packed

    def _unpack(self, stored: np.ndarray, count: int, dense: bool) -> np.ndarray:
        unpack = unpacked if not dense else unpacked_planes if self.planes else unpacked_stream
        return unpack(stored, self.bits, count)


def _cut(begin: int, end: int, bits: int, dense: bool) -> tuple[int, slice]:
    """The first code of the words with codes begin .. end, and the slice of these words. dense: 32 codes fill `bits`
    words."""
    each, step = (32, bits) if dense and 32 % bits else (32 // bits, 1)
    first = begin // each
    return first * each, slice(first * step, -(-end // each) * step)


def _size(parts: StoredParts, words: Tensor, zeros: Tensor, index: Tensor | None, groups: int,
          n: int) -> tuple[int, int]:
    """Bits of a code, and the number of inputs, from g_idx or else from the words."""
    if zeros.shape[:1] != (groups,):
        raise parts.fail(f"{words.name.removesuffix('qweight')}scales", f"has {groups} groups, but qzeros is "
                                                                        f"{show(list(zeros.shape))}")
    said = parts.method.bits
    fits = [bits for bits in _BITS if zeros.shape in ((groups, -(-n // (32 // bits))), (groups, n * bits // 32))]
    if index is not None:
        parts.need(index.name, ("I32", "I64"), beside=words.name)
        fits = [bits for bits in fits if len(index.shape) == 1 and words.rows in (
            -(-index.columns // (32 // bits)), index.columns * bits / 32)]
    # 8 bits take as many words as 7 bits without codes across words
    fits = [b for b in fits if zeros.shape == (groups, n * b // 32)] or fits
    bits = next((b for b in fits if b in said), fits[-1] if fits and not said else None)
    if bits is None:
        inputs = "" if index is None else f" and g_idx {show(list(index.shape))}"
        raise parts.fail(zeros.name, f"is {show(list(zeros.shape))}, which fits no codes"
                                     f"{of_bits(said) or ' of 2 to 8 bits'} beside qweight {list(words.shape)}, scales "
                                     f"{[groups, n]}{inputs}")
    if index is not None:
        return bits, index.columns
    return bits, words.rows * 32 // bits if words.rows * 32 % bits == 0 else words.rows * (32 // bits)


def _group_size(parts: StoredParts, scales: Tensor, groups: int, k: int) -> int:
    """Inputs per group, by the configuration of the model or of a layer."""
    said, layers = parts.method.number("group_size", "q_group_size"), parts.method.of_layers
    if said is None or (layers and (said < 1 or -(-k // said) != groups)):
        sizes = (layer.get("group_size") for layer in layers)
        said = next((size for size in sizes if type(size) is int and size > 0 and -(-k // size) == groups),
                    -(-k // groups))
    size = k if said == -1 else said
    if size < 1 or -(-k // size) != groups:
        raise parts.fail(scales.name, f"has {groups} groups, expected {-(-k // size) if size > 0 else '1 or more'}: "
                                      f"{k} inputs in groups of {said}")
    return min(size, k)


def _awq(parts: StoredParts, stem: str, words: Tensor, scales: Tensor) -> CodedMatrix:
    (groups, n), k = scales.shape, words.rows
    size = _group_size(parts, scales, groups, k)
    zeros = parts.need(f"{stem}.qzeros", WORDS, (groups, n // 8), beside=words.name)
    if k % size:
        raise parts.fail(scales.name, f"has groups of {size} inputs, which do not divide {k}")

    def codes(packed: np.ndarray) -> np.ndarray:
        """Unpack codes [rows, N] from words [rows, N / 8]."""
        found = unpacked(np.ascontiguousarray(packed), 4, 8 * packed.shape[1]).reshape(len(packed), -1, 8)
        return found[:, :, np.argsort(_AWQ_ORDER)].reshape(len(packed), -1)

    def rows(begin: int, end: int) -> CodedRows:
        first, last = begin // 8, -(-end // 8)
        some = slice(begin - 8 * first, end - 8 * first)
        return CodedRows(*(np.ascontiguousarray(found.T, kind) for found, kind in (
            (codes(integers(words)[:, first:last])[:, some], np.uint8),
            (some_scales(scales, slice(None), slice(begin, end)), np.float32),
            (codes(integers(zeros)[:, first:last])[:, some], np.float32))))

    return CodedMatrix(f"{stem}.weight", (n, k), rows, 4, scales.type.name, size, turned=True, sources=(words,))


def _gemv(parts: StoredParts, stem: str, words: Tensor, scales: Tensor) -> CodedMatrix:
    n, k = words.rows, 8 * words.columns
    size = parts.method.number("group_size", "q_group_size")
    size = k if size == -1 else size
    if size is None or size < 1 or k % size or k // size > scales.columns or scales.rows != n:
        raise parts.fail(scales.name, f"is {scales.type.name} {list(scales.shape)}, expected {n} rows with a scale for "
                                      f"each {size} of {k} inputs")
    groups = k // size
    zeros = parts.need(f"{stem}.qzeros", WORDS, (n, scales.columns // 8), beside=words.name)
    if 8 * zeros.columns < groups:
        raise parts.fail(zeros.name, f"is {zeros.type.name} {list(zeros.shape)}, expected zeros of {groups} groups")

    def rows(begin: int, end: int) -> CodedRows:
        some = slice(begin, end)
        return CodedRows(unpacked(integers(words)[some], 4, k), some_scales(scales, some, slice(0, groups)),
                         unpacked(integers(zeros)[some], 4, groups).astype(np.float32))

    return CodedMatrix(f"{stem}.weight", (n, k), rows, 4, scales.type.name, size, turned=True, sources=(words,))


def _gemv_fast(parts: StoredParts, stem: str, words: Tensor, scales: Tensor) -> CodedMatrix:
    n, k = 4 * words.rows, words.columns
    size = parts.method.number("group_size", "q_group_size")
    size = k if size == -1 else size
    if size is None or size < 1 or k % size or k % _FAST_STEP or k // size > scales.rows or scales.columns != n:
        raise parts.fail(scales.name, f"is {scales.type.name} {list(scales.shape)}, expected a row for each {size} of "
                                      f"{k} inputs, which are a multiple of {_FAST_STEP}, and {n} columns")
    zeros, groups = parts.need(f"{stem}.qzeros", SCALES, scales.shape, beside=words.name), k // size
    back = np.argsort(_FAST_ORDER)

    def rows(begin: int, end: int) -> CodedRows:
        first, last, columns = begin // 4, -(-end // 4), slice(begin, end)
        codes = unpacked(integers(words)[first:last].view(np.uint16), 4, 4 * k)  # of 64 columns, 4 in a word
        by_row = codes.reshape(-1, k // _FAST_STEP, 4, _FAST_STEP).transpose(0, 2, 1, 3).reshape(-1, k // 32, 32)
        own, offsets = (np.ascontiguousarray(some_scales(each, slice(0, groups), columns).T)
                        for each in (scales, zeros))
        return CodedRows(by_row[begin - 4 * first:end - 4 * first, :, back].reshape(-1, k), *zeros_of(own, offsets))

    return CodedMatrix(f"{stem}.weight", (n, k), rows, 4, "F32", size, zero_type="F32", turned=True, sources=(words,))
