"""A tiny encoder-decoder on disk with language tokens."""

import json

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from tests.engine.published import write_case

EOS = "</s>"
WORDS = ["<s>", "<pad>", EOS, "<unk>", *(f"w{i}" for i in range(26))]  # ids 0 .. 29; languages follow


def write_translator(folder, languages, template="$A </s>", special=True, case="m2m100", **config):
    """A case of tests/specs with words w0, w1, ... as tokens 4, 5, ... and these languages as 30, 31, ...

    template: what the tokenizer puts around a text. special: languages are special tokens. Returns the folder.
    """
    write_case(case, folder, eos_token_id=2, **config)
    words = WORDS + ([] if special else list(languages))
    library = Tokenizer(WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = WhitespaceSplit()
    added = (*WORDS[:4], *(languages if special else ()))
    library.add_special_tokens([AddedToken(text, normalized=False) for text in added])
    used = [word for word in template.split() if word != "$A"]
    library.post_processor = TemplateProcessing(single=template, special_tokens=[
        (word, library.token_to_id(word)) for word in used])
    library.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": EOS, "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder
