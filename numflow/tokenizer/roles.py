"""Token ids by role: declared in files, overridden by options, and known end-of-turn tokens."""

from collections.abc import Mapping
from typing import Any

from numflow.errors import TokenizerError
from numflow.tokenizer.tokenizer import ROLES, Roles
from numflow.tokenizer.vocabulary import Vocabulary

# End tokens of a turn or a text, if they are added tokens, regardless of other declarations in the files.
END_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "<|EOT|>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<eos>",
    "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|call|>", "<|eot|>", "<|endofturn|>", "<|tool_response>", "<|flush|>",
    "<|calls|>",
)
# If the vocabulary has one of these, it ends the turn, and "<|end|>" ends only a message.
_TURN_AFTER_MESSAGE = ("<|return|>", "<|call|>", "<|flush|>", "<|calls|>")


def resolve(vocabulary: Vocabulary, given: Mapping[str, Any], options: Mapping[str, Any],
            ends: frozenset[int] = frozenset()) -> Roles:
    """Roles from `given` (role -> token text or id, None for none), overridden by the options' token texts.

    Raises:
        TokenizerError: an option names a token that is not in the vocabulary.
    """
    found: dict[str, int | None] = {}
    for role in ROLES:
        found[role] = _id(vocabulary, given.get(role))
        if role in options:
            found[role] = vocabulary.id(options[role]) if options[role] else None
            if found[role] is None and options[role]:
                raise TokenizerError(f"[tokenizer] {role}: no token {options[role]!r} in the vocabulary")
    known = {text: vocabulary.added[text] for text in END_TEXTS if text in vocabulary.added}
    if any(text in known for text in _TURN_AFTER_MESSAGE):
        known.pop("<|end|>", None)
    eos = () if found["eos"] is None else (found["eos"],)
    return Roles(**found, ends=frozenset((*known.values(), *ends, *eos)))


def _id(vocabulary: Vocabulary, token: Any) -> int | None:
    """Id of a role given as text, id, or added-token table; None if the vocabulary lacks the token."""
    if isinstance(token, Mapping):
        token = token.get("content")
    if isinstance(token, str):
        return vocabulary.id(token)
    return token if type(token) is int and 0 <= token < vocabulary.size else None
