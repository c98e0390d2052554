"""A token's part of the text.

Invariant: the texts of a row of tokens, joined, are the text of the row (after another token, so a
leading space is kept). A character that several tokens spell is given to the last of them; bytes
that spell no character show as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Most bytes, so most tokens, that spell one character in UTF-8."""


class TokenPieces:
    """Texts of single tokens, remembered by id. For one thread at a time.

    Args:
        tokenizer: loaded; not changed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False).ids)
        self._before = len(self._decode(self._anchor))
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        self._pieces: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One text per token; an id outside the vocabulary is shown as `⟨id⟩`."""
        texts = [self._piece(number) for number in ids]
        start = 0
        while start < len(ids):
            is_part = REPLACEMENT in texts[start]
            start = self._join_character(ids, texts, start) if is_part else start + 1
        return texts

    def is_special(self, number: int) -> bool:
        """Whether the token is one of the tokenizer's special tokens."""
        return number in self._special

    def _piece(self, number: int) -> str:
        piece = self._pieces.get(number)
        if piece is None:
            piece = self._pieces[number] = self._make_piece(number)
        return piece

    def _make_piece(self, number: int) -> str:
        if not 0 <= number < 2**32 or self._tokenizer.id_to_token(number) is None:
            return id_as_text(number)
        return self._after_anchor([number])

    def _join_character(self, ids: Sequence[int], texts: list[str], start: int) -> int:
        """Join tokens from `start` that spell one character; where to go on."""
        for stop in range(start + 2, min(start + LONGEST_CHARACTER, len(ids)) + 1):
            if REPLACEMENT not in texts[stop - 1]:
                break
            text = self._after_anchor(ids[start:stop])
            if REPLACEMENT not in text:
                texts[start:stop] = [*([""] * (stop - start - 1)), text]
                return stop
        return start + 1

    def _after_anchor(self, ids: Sequence[int]) -> str:
        return self._decode([*self._anchor, *ids])[self._before :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def id_as_text(number: int) -> str:
    """How a token is shown that has no text."""
    return f"⟨{number}⟩"
