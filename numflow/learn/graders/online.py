"""Grader of a student's `merge`: single calls, then inside attention with keys in chunks in random order."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from numflow.learn.cases.build import run_case
from numflow.learn.cases.verdict import Functions, Verdict, Wrong, described, furthest, raised, right, wrong
from numflow.learn.graders.reference import KERNELS, adapted, chosen, replaced
from numflow.network.t5_buckets import bucket
from numflow.reference import program

CHUNKS = (4, 1, 64)  # keys per chunk
NAMES = ("m", "l", "o")
PARAMETERS = ["slopes", "sinks", "buckets", "cache", "heads", "scale", "causal", "window", "softcap", "bucket_distance"]


def merged(m, l, o, s, v):  # noqa: E741
    """The reference: m [H, n, 1], l [H, n, 1], o [H, n, E] of the keys so far, merged with a chunk's scores and values.
    """
    m2 = np.maximum(m, s.max(axis=2, keepdims=True))
    seen = np.where(np.isfinite(m2), m2, np.float32(0))  # exp(-inf - 0) is 0, exp(-inf + inf) is not
    a, p = np.exp(m - seen), np.exp(s - seen)
    return m2, l * a + p.sum(axis=2, keepdims=True), o * a + p @ v


def grade(functions: Functions, lab: Mapping[str, Any]) -> Verdict:
    """Grade `merge` in single calls, then inside attention on the lab's cases, with chunks of several sizes."""
    merge, single, cases = functions["merge"], _single(), chosen(lab["cases"], {"attention": PARAMETERS})
    of = len(single) + len(cases) * len(CHUNKS)
    for number, (name, arguments) in enumerate(single, 1):
        expected = merged(*arguments)
        try:
            with np.errstate(all="ignore"):
                found = _checked(merge(*(a.copy() for a in arguments)), expected)
        except Exception as error:
            return raised(name, number, of, error)
        for array, y, e in zip(NAMES, found, expected, strict=True):
            if line := _differs(y, e):
                return wrong(name, number, of, f"{array}, {line}", list(found), {"array": array})
    number = len(single)
    for chunk in CHUNKS:
        for case in cases:
            number += 1
            name = f"{case}, {chunk} key{'s' * (chunk > 1)} at a time"
            expected = run_case(case, program.Program)
            try:
                with installed(functions, lab, chunk=chunk), np.errstate(all="ignore"):
                    found = run_case(case, program.Program)
            except Exception as error:
                return raised(name, number, of, error)
            for run, (y, e) in enumerate(zip(found, expected, strict=True)):
                if place := furthest(y, e, case.bound):
                    return wrong(name, number, of, f"run {run}, {described(place)}", list(found), place)
    return right(of)


@contextmanager
def installed(functions: Functions, lab: Mapping[str, Any], model: bool = False, chunk: int = 16) -> Iterator[None]:
    """A context in which attention of the reference executor uses `merge`."""
    attention = attention_by(functions["merge"], chunk)
    with replaced({"attention": adapted("attention", attention, KERNELS["attention"], model)}):
        yield


def attention_by(merge: Callable, chunk: int) -> Callable:
    """The op `attention` with keys in chunks, in random order, merged by `merge`."""
    def attention(q, slopes=None, sinks=None, buckets=None, *, batch, cache, heads, scale, causal, window, softcap,
                  bucket_distance):
        y = np.empty((len(q), heads * cache.value_dim), np.float32)
        for b, length in enumerate(cache.lengths(batch)):
            rows = slice(batch.starts[b], batch.starts[b + 1])
            k, v = cache.read(cache.table(batch)[b], length, min(batch.positions[rows], default=0))
            queries = q[rows].reshape(-1, heads, k.shape[2]).transpose(1, 0, 2)
            k, v = (np.repeat(a, heads // a.shape[1], axis=1).transpose(1, 0, 2) for a in (k, v))
            m = np.full((heads, queries.shape[1], 1), -np.inf, np.float32)
            l, o = np.zeros_like(m), np.zeros((heads, queries.shape[1], v.shape[2]), np.float32)  # noqa: E741
            if sinks is not None:
                m[:], l[:] = sinks[:, None, None], 1
            starts = np.arange(0, length, chunk)
            for start in np.random.default_rng(length).permutation(starts):
                keys = slice(start, min(start + chunk, length))
                distance = np.arange(keys.start, keys.stop) - batch.positions[rows, None]
                s = np.float32(scale) * (queries @ k[:, keys].transpose(0, 2, 1))
                if softcap:
                    s = np.float32(softcap) * np.tanh(s / np.float32(softcap))
                if slopes is not None:
                    s = s - slopes[:, None, None] * np.abs(distance).astype(np.float32)
                if buckets is not None:
                    s = s + buckets[bucket(distance, len(buckets), bucket_distance, causal)].transpose(2, 0, 1)
                if cache.shape.kind == "self":
                    hidden = distance > 0 if causal else np.zeros(distance.shape, bool)
                    s[:, hidden | (np.abs(distance) >= window) if window else hidden] = -np.inf
                m, l, o = merge(m, l, o, s, v[:, keys])  # noqa: E741
            y[rows] = (o / l).transpose(1, 0, 2).reshape(queries.shape[1], -1)
        return y

    return attention


def _single() -> list[tuple[str, tuple]]:
    """Names and arguments of single calls: 2 heads, 3 queries, 5 keys, values of 4 columns."""
    rng = np.random.default_rng(4)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    empty = np.full((2, 3, 1), -np.inf, np.float32), np.zeros((2, 3, 1), np.float32), np.zeros((2, 3, 4), np.float32)
    s, v = 2 * normal(2, 3, 5), normal(2, 5, 4)
    before = merged(*empty, 2 * normal(2, 3, 5), normal(2, 5, 4))
    low, high = before[0] - 9, before[0] + 9
    partly = s.copy()
    partly[:, 1] = -np.inf
    return [("first-chunk", (*empty, s, v)), ("second-chunk", (*before, s, v)),
            ("scores-far-below", (*before, np.broadcast_to(low, s.shape).copy(), v)),
            ("scores-far-above", (*before, np.broadcast_to(high, s.shape).copy(), v)),
            ("large-scores", (*before, s + np.float32(200), v)), ("a-query-that-sees-none", (*before, partly, v)),
            ("nothing-seen-yet", (*empty, partly, v))]


def _checked(result: Any, expected: tuple) -> tuple:
    if not isinstance(result, tuple) or len(result) != 3:
        raise Wrong(f"merge should return m, l, o, but returns {type(result).__name__}")
    for array, y, e in zip(NAMES, result, expected, strict=True):
        if not isinstance(y, np.ndarray) or y.shape != e.shape:
            found = list(y.shape) if isinstance(y, np.ndarray) else type(y).__name__
            raise Wrong(f"merge returns {array} of shape {found}, expected {list(e.shape)}")
    return result


def _differs(y: np.ndarray, e: np.ndarray) -> str:
    """The first difference of two arrays in words, where -inf equals -inf; "" if there is none."""
    y, e = (np.where(np.isneginf(a), np.float32(-1e4), a) for a in (y, e))
    place = furthest(y.reshape(-1, y.shape[2]), e.reshape(-1, e.shape[2]), 1e-5)
    return described(place) if place else ""
