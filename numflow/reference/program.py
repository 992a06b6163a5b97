"""Program in NumPy, step by step: the executor to read, and to compare the others with."""

import inspect
import time

import numpy as np

from numflow.errors import NetworkError
from numflow.executor.base import OneDevice, kv_types
from numflow.executor.contract import ADAPT, TRACE, WALK, TraceRow
from numflow.network.states import stored_states
from numflow.network.windows import cache_windows
from numflow.ops import ADAPTING, EXCHANGES, caches_of, local, op_of, states_of
from numflow.reference import (
    act,
    adapt,
    attention,
    cache,
    convolution,
    embed,
    exchange,
    gated_recurrence,
    linear,
    linear_attention,
    moe,
    ngrams,
    norm,
    rope,
    select,
    wkv,
)
from numflow.reference.state import StateMemory

KERNELS = {
    "embed": embed.embed, "ngram_ids": ngrams.ngram_ids, "embed_ids": embed.embed_ids,
    "embed_position": embed.embed_position, "embed_type": embed.embed_type,
    "rms_norm": norm.rms_norm, "layer_norm": norm.layer_norm, "linear": linear.linear,
    "rope_angles": rope.rope_angles, "rope": rope.rope, "head_concat": select.head_concat,
    "head_linear": linear.head_linear,
    "cache_write": cache.cache_write, "index_select": attention.index_select, "index_tokens": attention.index_tokens,
    "block_select": attention.block_select, "attention": attention.attention, "pool": attention.pool, "act": act.act,
    "act_mul": act.act_mul, "gate_rows": act.gate_rows, "permute": act.permute, "mul": act.mul,
    "causal_conv": convolution.causal_conv, "add": act.add, "scale": act.scale,
    "scale_by_position": act.scale_by_position,
    "sparsify": act.sparsify, "match_rms": act.match_rms, "mix": act.mix, "balance": act.balance,
    "softcap": act.softcap, "clamp": act.clamp,
    "copy": act.copy, "select_rows": select.select_rows, "moe_route": moe.moe_route, "expert_scale": moe.expert_scale,
    "expert_linear": moe.expert_linear,
    "signed_sqrt": act.signed_sqrt, "softplus": act.softplus, "linear_attention": linear_attention.linear_attention,
    "gated_recurrence": gated_recurrence.gated_recurrence, "wkv": wkv.wkv,
    "expert_combine": moe.expert_combine,
}
OF_ADAPTERS = {"adapt": adapt.adapt, "adapt_rows": adapt.adapt_rows}
BETWEEN_DEVICES = {
    "send": exchange.send, "receive": exchange.receive, "all_reduce": exchange.all_reduce,
    "all_gather": exchange.all_gather,
}
World = exchange.World


class Program(OneDevice):
    """A network bound to NumPy arrays. Arithmetic is float32, whatever types the file has.

    activations, threads: accepted as options of every executor, and ignored: activations are float32, threads are those
    of NumPy's BLAS.
    kv_k, kv_v: types of cached keys and values, of quant.kv.KV_TYPES, or "auto": f32.
    state_type: type to which matrix states are rounded, of quant.state.STATE_TYPES, or "auto": the network's choice.
    world, device: the world of a plan's devices and this device's index.
    """

    activations, threads, can = "f32", None, frozenset({TRACE, WALK, ADAPT})

    def __init__(self, network, weights, block_size=16, activations="f32", threads=None, kv_k="auto", kv_v="auto",
                 world=None, device=0, state_type="auto"):
        kv = kv_types("f32", kv_k, kv_v)
        super().__init__(network, block_size)
        self.observer = None  # called as observer(step, inputs) before each step that runs
        self.keeps_weights = True  # keep converted weights; else steps convert them each time, to save memory
        self._source, self._world, self._device = weights, world, device
        self._weights = {}
        self._parts = {}  # by adapter
        windows = cache_windows(network)
        self._caches = {name: cache.KVCache(c, block_size, *kv, windows.get(name, 0))
                        for name, c in network.caches.items()}
        self._states = {name: StateMemory(state) for name, state in stored_states(network, state_type).items()}

    @property
    def weights_bytes(self):
        """Bytes of all weights as float32."""
        return sum(4 * int(np.prod(w.shape)) for w in self.network.weights.values())

    def run(self, batch, entry="main", output="logits", wanted=True):
        """Run `entry` on the batch; see executor.contract.Program."""
        buffers = self._started(batch, entry, output)
        for step in self._steps(entry, output):
            self._step(step, batch, buffers)
        self._latest = buffers
        return _columns(buffers, self.network.outputs[output]) if wanted and output is not None else None

    def result(self, output):
        """See executor.contract.Program."""
        return _columns(self._latest, self.network.outputs[output]).copy()

    def trace(self, batch, entry="main"):
        """Run all steps; one TraceRow per step."""
        buffers, rows = self._started(batch, entry, None), []
        for index, step in enumerate(self._steps(entry, None)):
            begin = time.perf_counter()
            self._step(step, batch, buffers)
            microseconds = (time.perf_counter() - begin) * 1e6
            rows.append(TraceRow(index, step.label, step.op, self._shapes(step, batch), _where(step.op), microseconds))
        return rows

    def walk(self, batch, entry="main", first=0, given=None):
        """Run step by step; see executor.contract.Program."""
        buffers = self._started(batch, entry, None)
        if given is not None:
            _columns(buffers, given[0])[:] = given[1]
        for index, step in enumerate(self._steps(entry, None)):
            if index >= first:
                self._step(step, batch, buffers)
                yield index, [_columns(buffers, view).copy() for view in step.outputs]

    def weight(self, name):
        """A weight as float32 array, converted once if weights are kept."""
        if not self.keeps_weights:
            return self._source.f32(name)
        if name not in self._weights:
            self._weights[name] = self._source.f32(name)
        return self._weights[name]

    def set_adapter(self, number, parts):
        """See executor.contract.Program."""
        self._parts.pop(number, None)
        if parts is not None:
            self._parts[number] = dict(parts)
        self.adapters = max(self._parts, default=-1) + 1

    def forget(self, names):
        """Drop these weights; they are converted again on next use."""
        for name in names:
            self._weights.pop(name, None)

    def _drop(self):
        self._weights.clear()

    def _steps(self, entry, output):
        """The steps of `entry` up to the last one that writes `output`."""
        return self.network.entries[entry][:self._end(entry, output)]

    def _started(self, batch, entry, output):
        """Check the batch and return new arrays by buffer name; NaN exposes columns that are read before written."""
        self._end(entry, output)
        self._checked(batch, entry)
        rows = self._rows(batch)
        buffers = {b.name: np.full((rows[b.rows], b.width), np.nan, np.float32) if b.dtype == "f32"
                   else np.zeros((rows[b.rows], b.width), np.int32) for b in self.network.buffers.values()}
        for view, given in self._given(batch, entry):
            _columns(buffers, view)[:] = given
        return buffers

    @np.errstate(over="ignore", invalid="ignore")  # infinities and NaN show in results, as with other executors
    def _step(self, step, batch, buffers):
        inputs = [_columns(buffers, view) for view in step.inputs]
        if self.observer is not None:
            self.observer(step, inputs)
        weights = {role: self.weight(name) for role, name in step.weights.items()}
        params = {**op_of(step).params, **step.params}
        params |= {key: self._caches[name] for key, name in caches_of(step).items()}
        params |= {key: self._states[name] for key, name in states_of(step).items()}
        if local(step) == "batch":
            params["batch"] = batch
        if step.op in ("moe_route", "head_concat", "index_select", "index_tokens", "block_select"):
            params["width"] = step.outputs[0].width
        if step.op == "moe_route" and len(inputs) > 1:
            params["experts"] = inputs.pop()
        if step.op == "expert_linear":
            params["groups"] = self.network.weights[step.weights["weight"]].groups
        if step.op in EXCHANGES:
            params |= {"world": self._world, "device": self._device}
        if step.op in ADAPTING:
            part, rows = params.pop("part"), self.network.buffers[step.outputs[0].buffer].rows
            params["adapters"] = _of_rows(params["batch"], rows)
            params["parts"] = {number: parts.get(part) for number, parts in self._parts.items()}
        results = _function(step.op)(*inputs, **weights, **params)
        for view, result in zip(step.outputs, _as_tuple(results), strict=True):
            y = _columns(buffers, view)
            if len(result) > len(y) or result.shape[1] != view.width:
                raise NetworkError(f"{step}: result is {list(result.shape)}, {view} has room for {list(y.shape)}")
            y[: len(result)] = result


def _columns(buffers, view):
    return buffers[view.buffer][:, view.start:view.start + view.width]


def _as_tuple(results):
    return results if isinstance(results, tuple) else () if results is None else (results,)


def _of_rows(batch, rows):
    """The adapter index of each row of the batch (or of each wanted row), -1 for none."""
    by_sequence = np.full(len(batch.starts) - 1, -1) if batch.adapters is None else np.asarray(batch.adapters)
    tokens = np.repeat(by_sequence, np.diff(batch.starts))
    if batch.adapter_starts is not None:
        tokens = np.where(batch.positions < np.repeat(batch.adapter_starts, np.diff(batch.starts)), -1, tokens)
    return tokens[batch.logit_rows] if rows == "logits" else tokens


def _function(op):
    return KERNELS.get(op) or OF_ADAPTERS.get(op) or BETWEEN_DEVICES[op]


def _where(op):
    """file:line of the function that implements an op."""
    code = inspect.unwrap(_function(op)).__code__
    return f"{'/'.join(code.co_filename.replace(chr(92), '/').split('/')[-3:])}:{code.co_firstlineno}"
