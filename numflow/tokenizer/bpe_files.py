"""vocab.json with merges.txt: byte-level BPE."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, quoted
from numflow.tokenizer import pieces, pretokenize, wrapping
from numflow.tokenizer.added import add_to_library, collect
from numflow.tokenizer.names import names
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.side_files import SideFiles, read_text, read_vocab
from numflow.tokenizer.tokenizer import Tokenizer
from numflow.tokenizer.vocabulary import LibraryVocabulary, library_errors


def load(path: Path, checkpoint: Any, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a vocab.json with merges.txt and the side files.

    Raises:
        FormatError: a file is damaged.
        TokenizerError: an option does not fit.
    """
    vocab = read_vocab(path)
    merges_path = Path(checkpoint.files.get("merges.txt", path.with_name("merges.txt")))
    rule = pretokenize.rule_of(options.get("pre", names()["bpe"]["pre"]), str(path))
    library = build(vocab, read_merges(merges_path), rule, str(merges_path))
    side = SideFiles(checkpoint)
    add_to_library(library, collect(vocab, max(vocab.values()) + 1, (), side, options), str(path))
    vocabulary = LibraryVocabulary(library, pieces.byte_level, str(path))
    roles = resolve(vocabulary, side.roles(), options, side.end_ids())
    around = wrapping.Wrapping()
    if roles.cls is not None and roles.sep is not None:
        around = wrapping.around(roles.cls, roles.sep, [roles.sep, roles.sep])
    wanted = {key: options.get(key, side.flag(f"{key}_token")) for key in ("add_bos", "add_eos")}
    return Tokenizer(vocabulary, roles, around.changed(roles.bos, roles.eos, **wanted),
                     options.get("chat_template", side.chat_template()))


def build(vocab: dict[str, int], merges: list[tuple[str, str]], rule: Mapping[str, Any], where: str,
          unk: str | None = None) -> Any:
    """A `tokenizers.Tokenizer` of a BPE vocabulary with a pre-tokenizer rule of names.toml.

    Raises:
        FormatError: a merge uses or makes a token that is not in the vocabulary.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    characters, misfit = "spaces" in rule, f"{where}: the merges do not fit the vocabulary"
    made = next((token for first, second in merges if (token := first + second) not in vocab), None)
    if made is not None:
        raise FormatError(f"{misfit}: one makes {quoted(made)}, which is no token")
    with library_errors(misfit):
        library = Library(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.get("ignore_merges", False),
                                     byte_fallback=characters, fuse_unk=characters, unk_token=unk))
    library.normalizer, library.pre_tokenizer = pretokenize.build(rule)
    return library


def read_merges(path: Path) -> list[tuple[str, str]]:
    """merges.txt: two tokens a line, the best merge first, after an optional line "#version: ...".

    Raises:
        FormatError: a line is not two tokens.
    """
    merges = []
    for n, line in enumerate(read_text(path).split("\n")):
        line = line.rstrip("\r")
        if not line or (n == 0 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise FormatError(f"{path}: line {n + 1} should be two tokens, is {line[:80]!r}")
        merges.append((pair[0], pair[1]))
    return merges
