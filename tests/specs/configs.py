"""Tiny configurations with the keys that published models of each family have: name -> (kind, config, options).

kind: "causal", "multimodal", "audible" and "musical" (the language model inside), "masked", "hidden" (no head), "text"
(an encoder alone), "classifier", "translate" or "describe" (an encoder-decoder with image input).

options:
    lengths:   of the prompts.
    types:     segment ids.
    attention: transformers' implementation.
    extra:     tensors that transformers does not write by itself.
    kept:      suffixes of tensors that follow from the configuration, and keep their values.
    renamed:   part of a name -> its form in published files.
    turned:    suffixes of stacks that published files store transposed.
    part:      the part that is run, of a class that requires images.
"""

from tests.specs.configs_2026 import CASES_2026
from tests.specs.configs_decoder import DECODERS
from tests.specs.configs_embedding import EMBEDDING
from tests.specs.configs_further_decoders import FURTHER_DECODERS
from tests.specs.configs_further_encoders import FURTHER_ENCODERS
from tests.specs.configs_further_parts import FURTHER_PARTS
from tests.specs.configs_further_translators import FURTHER_TRANSLATORS
from tests.specs.configs_gated_sums import GATED
from tests.specs.configs_last_parts import LAST_PARTS
from tests.specs.configs_last_text import LAST_TEXT
from tests.specs.configs_late_dense import LATE_DENSE
from tests.specs.configs_late_loops import LOOPS
from tests.specs.configs_late_moe import LATE_MOE
from tests.specs.configs_late_others import DECODERS as OTHERS
from tests.specs.configs_late_others import ENCODERS as LATE_ENCODERS
from tests.specs.configs_late_others import TRANSLATORS as LATE_TRANSLATORS
from tests.specs.configs_late_parts import PARTS
from tests.specs.configs_more_decoders import DECODERS as MORE_DECODERS
from tests.specs.configs_more_encoders import ENCODERS as MORE_ENCODERS
from tests.specs.configs_more_moe import MORE_MOE
from tests.specs.configs_more_parts import MORE_PARTS
from tests.specs.configs_more_translators import TRANSLATORS as MORE_TRANSLATORS
from tests.specs.configs_other import ENCODERS, TRANSLATORS
from tests.specs.configs_recurrent import RECURRENT

CASES = {name: (options.get("kind", "causal"), config, options)
         for name, (config, options) in (DECODERS | CASES_2026 | PARTS | OTHERS | LATE_DENSE).items()}
CASES |= ENCODERS | LATE_ENCODERS | EMBEDDING
CASES |= MORE_DECODERS | MORE_ENCODERS | MORE_PARTS | MORE_TRANSLATORS | MORE_MOE
CASES |= FURTHER_PARTS | FURTHER_DECODERS | FURTHER_ENCODERS | FURTHER_TRANSLATORS
CASES |= RECURRENT | LATE_MOE | LOOPS | LAST_PARTS | LAST_TEXT | GATED
CASES |= {name: ("translate", config, options) for name, (config, options) in (TRANSLATORS | LATE_TRANSLATORS).items()}
