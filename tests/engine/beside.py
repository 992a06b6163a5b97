"""Requests by themselves, and the same requests side by side: for engine tests of memory of other kinds."""

import numflow

GREEDY = {"max_tokens": 12, "ignore_eos": True}
CPU = {"backend": "cpu", "activations": "f32", "threads": 1}
EXECUTORS = {"reference": {"backend": "reference", "block_size": 16}, "cpu": {**CPU, "threads": 2},
             "layers": {**CPU, "devices": "0;1"}, "tensors": {**CPU, "devices": "0&1"}}
ENGINES = [{}, {"preemption": "swap"}, {"preemption": "recompute"}, {"max_step_tokens": 7}]


def ids_alone(folder, executor, prompts, settings):
    """The ids of each prompt by each of the settings, without other requests and without a prefix cache."""
    with numflow.load(folder, **EXECUTORS[executor]) as model, numflow.Engine(model, prefix_cache=False) as engine:
        return [[one.ids for one in engine.submit(prompt, **GREEDY, **own).results()]
                for prompt in prompts for own in settings]


def check_side_by_side(folder, executor, prompts, settings, options, expected, memory):
    """Submit all at once, twice: the second time all prompts are in the prefix cache. options: of the engine; with a
    preemption, keys and values have the bytes memory(program), too few for all."""
    with numflow.load(folder, **EXECUTORS[executor]) as model:
        if "preemption" in options:
            options = {**options, "kv_memory": memory(model.program)}
        with numflow.Engine(model, **options) as engine:
            for _ in range(2):
                handles = [engine.submit(prompt, priority=number % 2, **GREEDY, **own)
                           for number, (prompt, own) in enumerate((p, s) for p in prompts for s in settings)]
                assert [[one.ids for one in handle.results()] for handle in handles] == expected
            assert engine.stats["preemptions"] > 0 or "preemption" not in options
