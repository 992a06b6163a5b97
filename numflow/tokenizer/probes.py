"""Texts on which two tokenizers are compared."""

import random
from functools import cache
from typing import Any

_TEXTS = (
    "Hello, world! It's 2024; we've 1,234,567.89 reasons (or 12345678901) to say: \"don't\" 'twas I'LL, you're.",
    "  two  spaces   three    four\ttab\t\ttabs\nline\n\nlines\r\n windows \n  \n   indented  ",
    "def f(x_1, y):\n    return {'a': x_1[0] ** 2, \"b\": y != 0xFF}  # comment...\n\n\n\tif(!a&&b||c){}//",
    "Füße, naïve café déjà vu, Ångström, ŁÓDŹ, İstanbul ıı, ﬁ ligature, ½ ² ₂ Ⅷ ①",
    "e\u0301 a\u0308 n\u0303 decomposed; \u1100\u1161\u11a8 jamo; \u0915\u094d\u0937\u093f marks",
    "Привет, как дела? Ελληνικά κείμενο. مرحبا بالعالم، ١٢٣٤٥ שלום עולם हिन्दी में १२३ ไทยภาษา",
    "中文文本，测试。日本語のテキスト、カタカナ！한국어 텍스트 ｆｕｌｌ　ｗｉｄｔｈ １２３「引用」",
    "emoji 😀😃👩‍👩‍👧‍👦🇩🇪👍🏽 symbols ©®™ €£¥ ∑∏√∞≠≤ →←↔ ♠♥ \u00a0nbsp\u2003em\u200bzero\u200dwidth\ufeff",
    "'s 't 're 've 'm 'll 'd 'S 'T O'Neil rock'n'roll ’s ’t camelCase HTTPServer iPhone15Pro ABCdef XMLHttp",
    "a.b,c;d:e!f?g-h_i=j+k*l/m\\n|o~p`q@r#s$t%u^v&w(x)y[z]{}<>... --- === ___ !!! ??? .,.,;;::",
    "1 12 123 1234 12345 123456 1234567 3.14159 -1e-10 0x1F 2nd 3rd v1.2.3 2024-01-31T23:59:59Z",
    " leading", "trailing ", "\n", " ", "a", "",
)
_RANDOM_TEXTS, _TOKENS_OF_EACH = 40, 60


@cache
def _mixed() -> tuple[str, ...]:
    """Characters of all kinds, in random order."""
    rng = random.Random(0)
    ranges = ((0x20, 0x7F), (0xA1, 0x250), (0x370, 0x600), (0x620, 0x6F0), (0x900, 0xA00), (0xE00, 0xE60),
              (0x1E00, 0x2070), (0x20A0, 0x20C0), (0x2190, 0x2400), (0x3000, 0x3100), (0x4E00, 0x9000),
              (0xAC00, 0xD7A0), (0xFF01, 0xFF60), (0x1F300, 0x1F650))
    texts = []
    for _ in range(12):
        some = (chr(rng.randrange(*rng.choice(ranges))) if rng.random() < 0.6 else rng.choice("aZ9 \n'.")
                for _ in range(150))
        texts.append("".join(some))
    return tuple(texts)


def probes(tokenizer: Any = None, rows: int = 0) -> list[str]:
    """Texts of many scripts, and random texts of a tokenizer's tokens below `rows`; deterministic."""
    texts = [*_TEXTS, *_mixed()]
    if tokenizer is not None:
        rng = random.Random(1)
        plain = [id for id in range(min(rows, tokenizer.vocab_size))
                 if id not in tokenizer.special_ids and tokenizer.vocabulary.text(id) is not None]
        for _ in range(_RANDOM_TEXTS if plain else 0):
            chosen = [rng.choice(plain) for _ in range(_TOKENS_OF_EACH)]
            texts.append(tokenizer.decode(chosen).replace("\ufffd", ""))
    return texts
