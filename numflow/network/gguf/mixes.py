"""Names for `--weights`: schemes, GGUF types and mixes. A mix is expanded to rules for the tensors of a model."""

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
    """The recipe of this name, for a GGUF file or another file.

    Names of GGUF types and mixes have the same meaning in both. A short name such as "q4" is numflow's own scheme, and
    in a GGUF file the nearest GGUF type.

    Raises:
        RequestError: as `read_recipe`.
    """
    return read_recipe(name, WRITTEN, MIXES) if as_gguf_file else read_recipe(name, None, MIXES, BESIDE_SCHEMES)


def by_tensor(recipe: Recipe, built: Network, checkpoint: Checkpoint, spec: Spec, imatrix: bool) -> Recipe:
    """A recipe with its mix expanded to rules, or its type replaced for rows that are too short.

    built: the checkpoint's network, with fuse=False. imatrix: whether an importance matrix is used.

    Raises:
        RequestError: a mix for a model without a GGUF architecture.
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
