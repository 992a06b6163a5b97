"""A fake tokenizer with a text for each token: bytes as tokens."""

from tests.engine.fake import VOCABULARY, FakeTokenizer, fake_model


class LetterVocabulary:
    """Every id has a text."""

    def text(self, id):
        return chr(id)


class LetterTokenizer(FakeTokenizer):
    """Bytes as tokens."""

    vocab_size, vocabulary = VOCABULARY, LetterVocabulary()

    def token_bytes(self, id):
        return bytes([id]) if id < 256 else b""

    def token_text(self, id):
        return f"<{id}>"

    def encode(self, text, add_special=True, parse_special=True):
        return [256, *text.encode()] if add_special else list(text.encode())


def letter_model(rule=None, **options):
    """A fake model with this tokenizer."""
    model = fake_model(rule, **options)
    model._load_tokenizer = LetterTokenizer
    return model
