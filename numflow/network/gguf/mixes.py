"""Names of `--weights`: schemes, types and mixes of GGUF; a mix becomes rules for the tensors of a model."""

from dataclasses import replace
from pathlib import Path

from numflow import network
from numflow.formats import gguf_mixes
from numflow.formats.checkpoint import Checkpoint
from numflow.formats.gguf_mixes import MIXES
from numflow.formats.gguf_writer import BESIDE_SCHEMES, WRITTEN
from numflow.network.gguf.as_gguf import as_gguf
from numflow.network.quantise.quantise import matrices
from numflow.ops import Network
from numflow.quant.recipe import KEEP, Recipe, read_recipe
from numflow.spec.reader import Spec


def named(name: str | Path, as_gguf_file: bool = False) -> Recipe:
    """The recipe of that name, for a GGUF file or for others.

    Names of GGUF types and mixes mean the same in both. A name such as "q4" is a number of bits: numflow's own scheme
    of them, and in a GGUF file, which knows none of these, the type that comes nearest.

    Raises:
        RequestError: as `read_recipe`.
    """
    return read_recipe(name, WRITTEN, MIXES) if as_gguf_file else read_recipe(name, None, MIXES, BESIDE_SCHEMES)


def by_tensor(recipe: Recipe, built: Network, checkpoint: Checkpoint, spec: Spec, imatrix: bool) -> Recipe:
    """A recipe whose mix is written out, or whose type is exchanged where rows are too short for it.

    built: the checkpoint's network, with fuse=False. imatrix: whether it is known what matters.

    Raises:
        RequestError: a mix for a model that GGUF has no architecture for.
    """
    if recipe.weights not in MIXES and recipe.weights not in gguf_mixes.SHORT_ROWS:
        return recipe
    if checkpoint.naming != "gguf":
        checkpoint = as_gguf(checkpoint, spec)
        built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
    modules = matrices(built)
    found = gguf_mixes.types_of(recipe.weights, {name: checkpoint.tensors[name].columns for name in modules},
                                checkpoint.config, imatrix)
    rules = {module: kind for name, kind in found.items() for module in modules[name]}
    return replace(recipe, weights=KEEP, rules=(*recipe.rules, *rules.items()))
