"""Prompt templates in Inferflow's notation, encoded directly to token ids.

    {query} {question}          the text; {_query} {_question}: the text with a space before it
    {system_prompt}             the system prompt
    {res_prefix} {answer}       the answer starts here: the template ends, the response prefix follows
    {bos} {eos}                 special tokens, also {user_token} {assistant_token}
    {#64790}                    the token of that id
    {\\n}                        a line end
    {anything else}             the token with exactly this written form: {<|im_start|>}, {__zh__}, { }

Text between the pieces is tokenised piece by piece, without recognising special tokens. No special tokens are added
around the prompt.
"""

import re

from numflow.errors import TokenizerError
from numflow.tokenizer.tokenizer import ROLES, Tokenizer

_PIECE = re.compile(r"\{([^{}]+)\}")
_ROLE_PIECES = {"user_token": "user", "assistant_token": "assistant", **{role: role for role in ROLES}}


def encode_template(template: str, tokenizer: Tokenizer, query: str, system_prompt: str = "",
                    res_prefix: str = "") -> list[int]:
    """Token ids of a prompt.

    Raises:
        TokenizerError: a piece of the template is not a token of this vocabulary; the message names it.
    """
    texts = {"query": query, "question": query, "_query": " " + query, "_question": " " + query,
             "system_prompt": system_prompt}
    ids: list[int] = []
    for n, part in enumerate(_PIECE.split(template)):  # literal texts at even indices, pieces at odd ones
        if n % 2 == 0 or part in texts:
            ids += _plain(tokenizer, part if n % 2 == 0 else texts[part])
        elif part in ("res_prefix", "answer"):
            break
        else:
            ids += _special(tokenizer, part)
    return ids + _plain(tokenizer, res_prefix)


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False) if text else []


def _special(tokenizer: Tokenizer, piece: str) -> list[int]:
    if piece in _ROLE_PIECES:
        return [tokenizer.role_id(_ROLE_PIECES[piece])]
    if re.fullmatch(r"#\d{1,9}", piece):
        tokenizer.token_text(int(piece[1:]))  # raises if there is no such id
        return [int(piece[1:])]
    id = tokenizer.id_of("\n" if piece == "\\n" else piece)
    if id is not None:
        return [id]
    if piece == "\\n":
        return _plain(tokenizer, "\n")
    raise TokenizerError(f"prompt template: {{{piece}}} is no token of this vocabulary")
