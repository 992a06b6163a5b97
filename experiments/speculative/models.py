"""Target and draft models: files, toys, and drafts made from a file."""

import statistics
from dataclasses import replace


def open_model(path, threads, layers=4):
    """The model of a file; "random" is a toy that needs none."""
    import numflow
    from numflow.lab.shapes import Shape, random_network

    if path != "random":
        return numflow.load(path, threads=threads)
    return bound(*random_network(Shape(layers, 64, 4, 2, 128, 512, 512), "Q8_0"), threads)


def bound(built, checkpoint, threads):
    """A model of a network."""
    from numflow.cpu.program import Program
    from numflow.engine.model import Model
    from numflow.network import WeightSource
    from numflow.partition.cut.plan import single_device

    part = single_device(built, "cpu").part(0)
    return Model(built, Program(part, WeightSource(built, checkpoint), threads=threads, activations="int8"))


def draft_model(path, kind, value, threads):
    """A model: the file itself, another file, the file quantised again, or its first layers."""
    import numflow

    if kind == "bits":
        return numflow.load(path, weights=value, threads=threads, progress=False)
    if kind == "file" or path == "random":
        return open_model(path if path == "random" else value or path, threads, int(value or 4))
    return first_layers(numflow.registry.resolve(path), int(value), threads)


def first_layers(path, layers, threads):
    """The model of a GGUF file, without the later layers."""
    from numflow import formats, network

    checkpoint = formats.open_checkpoint(path)
    key, = (key for key in checkpoint.config if key.endswith("block_count"))
    checkpoint.config[key] = layers
    own = {name: tensor for name, tensor in checkpoint.tensors.items()
           if not name.startswith("blk.") or int(name.split(".")[1]) < layers}
    checkpoint = replace(checkpoint, tensors=own)
    return bound(network.build(network.choose_spec(checkpoint, None), checkpoint), checkpoint, threads)


def step_seconds(model):
    """Median time of a token."""
    model.generate([1, 2, 3], max_tokens=4, ignore_eos=True, speculate="off")
    return statistics.median(1 / model.generate([1, 2, 3], max_tokens=12, ignore_eos=True, speculate="off")
                             .stats["decode_tok_s"] for _ in range(3))
