"""Runs a network step by step in NumPy: the executor to read and to compare the others with."""

import inspect
import time

import numpy as np

from numflow.errors import NetworkError, RequestError, did_you_mean
from numflow.network.windows import cache_windows, counts
from numflow.ops import EXCHANGES, TraceRow, op_of
from numflow.quant.kv import KV_TYPES
from numflow.reference import act, attention, cache, embed, exchange, linear, moe, norm, rope, select

KERNELS = {
    "embed": embed.embed, "embed_position": embed.embed_position, "embed_type": embed.embed_type,
    "rms_norm": norm.rms_norm, "layer_norm": norm.layer_norm, "linear": linear.linear,
    "rope_angles": rope.rope_angles, "rope": rope.rope, "head_concat": select.head_concat,
    "head_linear": linear.head_linear,
    "cache_write": cache.cache_write, "attention": attention.attention, "act": act.act, "act_mul": act.act_mul,
    "gate_rows": act.gate_rows, "add": act.add, "scale": act.scale, "softcap": act.softcap, "clamp": act.clamp,
    "copy": act.copy,
    "select_rows": select.select_rows, "moe_route": moe.moe_route, "expert_linear": moe.expert_linear,
    "expert_combine": moe.expert_combine,
}
BETWEEN_DEVICES = {
    "send": exchange.send, "receive": exchange.receive, "all_reduce": exchange.all_reduce,
    "all_gather": exchange.all_gather,
}
World = exchange.World
USES_BATCH = {"embed", "embed_position", "embed_type", "rope_angles", "cache_write", "attention", "select_rows"}


class Program:
    """A network bound to NumPy arrays. Arithmetic is float32 whatever type the file has.

    activations, threads: accepted because every executor has them; the attribute `activations` says what is used.
    The threads are those of NumPy's BLAS.
    kv_k, kv_v: types of cached keys and values, of quant.kv.KV_TYPES, or "auto": f32.
    world, device: of a plan with several devices, where they meet and which of them this is.
    """

    failure = ""  # why nothing can run here any more

    def __init__(self, network, weights, block_size=16, activations="f32", threads=None, kv_k="auto", kv_v="auto",
                 world=None, device=0):
        for name, kind in (("kv_k", kv_k), ("kv_v", kv_v)):
            if kind not in ("auto", *KV_TYPES):
                raise RequestError(f"{name} should be one of auto, {', '.join(KV_TYPES)}, is {kind!r}")
        kv = [KV_TYPES[0] if kind == "auto" else kind for kind in (kv_k, kv_v)]
        self.network = network
        self.block_size = block_size
        self.activations = "f32"
        self.observer = None  # called as observer(step, inputs) before each step that runs
        self.weights_bytes = sum(4 * int(np.prod(w.shape)) for w in network.weights.values())
        self._source, self._world, self._device = weights, world, device
        self._weights = {}
        windows = cache_windows(network)
        self._caches = {name: cache.KVCache(c, block_size, *kv, windows.get(name, 0))
                        for name, c in network.caches.items()}
        self._routes = max((step.outputs[0].width for steps in network.entries.values() for step in steps
                            if step.op == "moe_route"), default=1)

    def reserve(self, blocks, cross_blocks=0, windows=None):
        """Make room for this many KV blocks, keeping the content of those that remain. windows: others than `blocks`
        for the layers with these windows."""
        own = counts(windows, blocks, self.network)
        for memory in self._caches.values():
            memory.resize(cross_blocks if memory.kind == "cross" else own[memory.window])

    @property
    def block_bytes(self):
        """Bytes of one self-attention KV block, all layers."""
        return sum(memory.block_bytes for memory in self._self_caches())

    @property
    def window_bytes(self):
        """Bytes of one KV block of the layers with each window."""
        return {window: sum(memory.block_bytes for memory in self._self_caches(window))
                for window in counts(None, 0, self.network)}

    @property
    def cross_block_bytes(self):
        """Bytes of one block of encoder memory, all layers."""
        return sum(memory.block_bytes for memory in self._caches.values() if memory.kind == "cross")

    def copy_blocks(self, sources, targets, window=None):
        """Copy self-attention KV blocks, all layers or those with a window."""
        for memory in self._self_caches(window):
            memory.copy(*(np.asarray(blocks, np.int64) for blocks in (sources, targets)))

    def save_blocks(self, blocks, window=None):
        """The content of self-attention KV blocks, uint8 [n, block_bytes], all layers or those with a window."""
        blocks = np.asarray(blocks, np.int64)
        empty = np.zeros((len(blocks), 0), np.uint8)
        return np.concatenate([empty, *(memory.save(blocks) for memory in self._self_caches(window))], 1)

    def load_blocks(self, blocks, data, window=None):
        """Put what `save_blocks` returned into blocks, the same or others."""
        at = 0
        for memory in self._self_caches(window):
            memory.load(np.asarray(blocks, np.int64), data[:, at:at + memory.block_bytes])
            at += memory.block_bytes

    def _self_caches(self, window=None):
        return [memory for memory in self._caches.values() if memory.kind == "self" and window in (None, memory.window)]

    def run(self, batch, entry="main", output="logits"):
        """Run `entry` on the batch.

        Returns:
            float32 [R, width of the output], or None if `output` is None: then all steps run.

        Raises:
            RequestError: no such entry or output.
        """
        buffers = self._buffers(batch)
        for step in self._steps(entry, output):
            self._step(step, batch, buffers)
        return None if output is None else _columns(buffers, self.network.outputs[output])

    def trace(self, batch, entry="main"):
        """The same run; one TraceRow per step."""
        buffers, rows = self._buffers(batch), []
        for index, step in enumerate(self._steps(entry, None)):
            begin = time.perf_counter()
            self._step(step, batch, buffers)
            microseconds = (time.perf_counter() - begin) * 1e6
            rows.append(TraceRow(index, step.label, step.op, _shapes(step, buffers), _where(step.op), microseconds))
        return rows

    def close(self):
        """Drop weights and caches."""
        self._weights.clear()
        self._caches.clear()

    def weight(self, name):
        """float32 array of a weight, converted once."""
        if name not in self._weights:
            self._weights[name] = self._source.f32(name)
        return self._weights[name]

    def forget(self, names):
        """Ask the source for these weights again when they are next used."""
        for name in names:
            self._weights.pop(name, None)

    def _steps(self, entry, output):
        """The steps of `entry` up to the last one that writes `output`."""
        if entry not in self.network.entries:
            raise RequestError(f"{self.network.name} has no entry {entry!r}{did_you_mean(entry, self.network.entries)}")
        steps = self.network.entries[entry]
        if output is None:
            return steps
        if output not in self.network.outputs:
            raise RequestError(f"{self.network.name} has no {output!r}{did_you_mean(output, self.network.outputs)}")
        view = self.network.outputs[output]
        last = [i for i, step in enumerate(steps) if any(_overlap(view, y) for y in step.outputs)]
        if not last:
            raise RequestError(f"entry {entry!r} of {self.network.name} does not compute {output!r}")
        return steps[: last[-1] + 1]

    def _buffers(self, batch):
        """Fresh arrays by buffer name; NaN shows a column that is read before it was written."""
        tokens = len(batch.tokens)
        rows = {"tokens": tokens, "logits": len(batch.logit_rows), "routes": tokens * self._routes}
        return {b.name: np.full((rows[b.rows], b.width), np.nan, np.float32) if b.dtype == "f32"
                else np.zeros((rows[b.rows], b.width), np.int32) for b in self.network.buffers.values()}

    def _step(self, step, batch, buffers):
        inputs = [_columns(buffers, view) for view in step.inputs]
        if self.observer is not None:
            self.observer(step, inputs)
        weights = {role: self.weight(name) for role, name in step.weights.items()}
        params = {**op_of(step).params, **step.params}
        if "cache" in params:
            params["cache"] = self._caches[params["cache"]]
        if step.op in USES_BATCH:
            params["batch"] = batch
        if step.op in ("moe_route", "head_concat"):
            params["width"] = step.outputs[0].width
        if step.op == "expert_linear":
            params["groups"] = self.network.weights[step.weights["weight"]].groups
        if step.op in EXCHANGES:
            params |= {"world": self._world, "device": self._device}
        results = (KERNELS.get(step.op) or BETWEEN_DEVICES[step.op])(*inputs, **weights, **params)
        for view, result in zip(step.outputs, _as_tuple(results), strict=True):
            y = _columns(buffers, view)
            if len(result) > len(y) or result.shape[1] != view.width:
                raise NetworkError(f"{step}: result is {list(result.shape)}, {view} has room for {list(y.shape)}")
            y[: len(result)] = result


def _columns(buffers, view):
    return buffers[view.buffer][:, view.start:view.start + view.width]


def _overlap(a, b):
    return a.buffer == b.buffer and a.start < b.start + b.width and b.start < a.start + a.width


def _as_tuple(results):
    return results if isinstance(results, tuple) else () if results is None else (results,)


def _shapes(step, buffers):
    """Shapes of inputs and outputs: "[3, 64] -> [3, 112]"."""
    ins, outs = (", ".join(str(list(_columns(buffers, v).shape)) for v in views) for views in
                 (step.inputs, step.outputs))
    return f"{ins or '-'} -> {outs or '-'}"


def _where(op):
    """file:line of the function that implements an op."""
    code = inspect.unwrap(KERNELS.get(op) or BETWEEN_DEVICES[op]).__code__
    return f"{'/'.join(code.co_filename.replace(chr(92), '/').split('/')[-3:])}:{code.co_firstlineno}"
