"""Sections of a specification file about text: tokenizer and generation. A part of the schema."""

from numflow.spec.kinds import SpecOption
from numflow.spec.kinds import choice as _choice
from numflow.spec.kinds import integer as _int
from numflow.spec.kinds import number as _float
from numflow.spec.kinds import text as _text

TEXT: dict[str, dict[str, SpecOption]] = {
    "tokenizer": {
        "kind": _choice(("auto", "tokenizer.json", "sentencepiece", "gguf", "llama2c", "wordpiece", "bpe"), "auto",
                        "tokenizer reader; auto: chosen by the files"),
        "file": _text("", "tokenizer file in the checkpoint's folder"),
        "pre": _text("", "GGUF name of the pre-tokenizer of a byte-pair vocabulary"),
        "keep_space_after": _text("", "GGUF files with a SentencePiece vocabulary: added tokens, separated by spaces, "
                                      "that keep the white space behind them; all other added tokens swallow it"),
        "add_bos": SpecOption("bool", None, "put the BOS token first; if absent, as the checkpoint says"),
        "add_eos": SpecOption("bool", None, "put the EOS token last; if absent, as the checkpoint says"),
        "bos": _text("", "text of the BOS token"),
        "eos": _text("", "text of the EOS token"),
        "unk": _text("", "text of the unknown token"),
        "pad": _text("", "text of the padding token"),
        "chat_template": _text("", "Jinja template over `messages`"),
    },
    "generation": {
        "template": _text("", "prompt template: literal text with {query}, {bos}, {#ID} and {token}"),
        "system_prompt": _text("", "default system message"),
        "temperature": _float(0.0, "default sampling temperature; 0 = greedy", 0),
        "top_k": _int(0, "default top-k; 0 = off", 0),
        "top_p": _float(1.0, "default top-p; 1 = off", 0, 1),
        "decoder_start": _int("decoder_start_token", "encoder-decoder: first input token of the decoder", -1),
        "forced_bos": _int("forced_bos_token", "encoder-decoder: token that is always generated first", -1),
        "pooling": _choice(("none", "mean", "cls", "last"), "none", "pooling of hidden states to an embedding"),
    },
}
