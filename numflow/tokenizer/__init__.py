"""Text to token ids and back: one Tokenizer class over the vocabularies that checkpoints carry.

    load.py          choice of the tokenizer file of a checkpoint
    tokenizer.py     Tokenizer: special tokens around text, decoding, streaming, chat
    json_file.py, sentencepiece_file.py, gguf_vocabulary.py, scored_file.py, vocabulary_files.py    the formats
    chat.py, inferflow_template.py    prompt templates
"""

from numflow.tokenizer.load import load_tokenizer
from numflow.tokenizer.tokenizer import StreamDecoder, Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer"]
