"""Sections of a specification file about text itself: the tokenizer and generation. A part of the schema."""

from numflow.spec.kinds import SpecOption
from numflow.spec.kinds import choice as _choice
from numflow.spec.kinds import number as _float
from numflow.spec.kinds import text as _text
from numflow.spec.kinds import whole as _int

TEXT: dict[str, dict[str, SpecOption]] = {
    "tokenizer": {
        "kind": _choice(("auto", "tokenizer.json", "sentencepiece", "gguf", "llama2c", "wordpiece", "bpe"), "auto",
                        "which reader; auto goes by the files"),
        "file": _text("", "file of the tokenizer inside the checkpoint's folder"),
        "pre": _text("", "name of a GGUF byte-pair pre-tokenizer"),
        "keep_space_after": _text("", "of GGUF files with a SentencePiece vocabulary: the added tokens, with spaces "
                                      "between, that do not swallow the white space behind them as all others do"),
        "add_bos": SpecOption("bool", None, "put the begin token first; the file's own word if absent"),
        "add_eos": SpecOption("bool", None, "put the end token last; the file's own word if absent"),
        "bos": _text("", "text of the begin token"),
        "eos": _text("", "text of the end token"),
        "unk": _text("", "text of the unknown token"),
        "pad": _text("", "text of the padding token"),
        "chat_template": _text("", "Jinja template over `messages`"),
    },
    "generation": {
        "template": _text("", "prompt template: literal text and {query}, {bos}, {#ID}, {token} pieces"),
        "system_prompt": _text("", "default of the system message"),
        "temperature": _float(0.0, "default", 0),
        "top_k": _int(0, "default", 0),
        "top_p": _float(1.0, "default", 0, 1),
        "decoder_start": _int("decoder_start_token", "encoder-decoder: the first token given to the decoder", -1),
        "forced_bos": _int("forced_bos_token", "encoder-decoder: the first token that is generated", -1),
        "pooling": _choice(("none", "mean", "cls", "last"), "none", "how embeddings are made of hidden states"),
    },
}
