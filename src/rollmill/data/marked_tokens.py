"""From marked text to token ids with a mask, exact at every border.

At a turn's start the model has the prompt's tokens and writes on; so no token may straddle a
border. The text is cut there and the pieces are tokenized by themselves, all pieces of many rows at
once. Then the tokens are decoded again: they must give the text. Tokenizers that put a space
before each text they are given fail that (SentencePiece does); for them the whole text is tokenized
once, and each border must fall between two of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmill.data.masks import MarkedText
from rollmill.data.readers import BadRowError
from rollmill.data.template import Tokenizer
from rollmill.sample import BoolArray, IntArray, int_array


@dataclass(frozen=True, slots=True)
class MarkedTokens:
    """Token ids of a text, and which of them to learn.

    Attributes:
        tokens: int32 [T].
        mask: bool [T].
    """

    tokens: IntArray
    mask: BoolArray


class MarkedTokenizer:
    """Tokenizes marked texts.

    Args:
        tokenizer: the model's.
        adds_special: whether the tokenizer's own special tokens go before a text (a rendered
            template has them already).
    """

    def __init__(self, tokenizer: Tokenizer, *, adds_special: bool) -> None:
        self._tokenizer = tokenizer
        self._adds_special = adds_special

    def tokens(self, texts: Sequence[MarkedText]) -> list[MarkedTokens | BadRowError]:
        """Per text its tokens, or the reason why a border cannot be found in them."""
        cut = [_pieces(text) for text in texts]
        firsts = self._encode([pieces[0][0] for pieces in cut], special=self._adds_special)
        rest = [piece for pieces in cut for piece, _ in pieces[1:]]
        others = iter(self._encode(rest, special=False))
        results: list[MarkedTokens | BadRowError] = []
        for text, pieces, first in zip(texts, cut, firsts, strict=True):
            ids = [first, *(next(others) for _ in pieces[1:])]
            try:
                results.append(self._checked(text, pieces, ids))
            except BadRowError as reason:
                results.append(reason)
        return results

    def _checked(
        self, text: MarkedText, pieces: Sequence[tuple[str, bool]], ids: list[list[int]]
    ) -> MarkedTokens:
        flat = [token for piece in ids for token in piece]
        if not self._decodes_to(flat, text.text):
            ids = self._whole(text, pieces)
        mask = np.repeat([is_learned for _, is_learned in pieces], [len(piece) for piece in ids])
        if text.is_open:
            ids, mask = [*ids, [self._end_of_sequence()]], np.append(mask, True)
        tokens = [token for piece in ids for token in piece]
        return MarkedTokens(int_array(tokens), mask.astype(np.bool_))

    def _decodes_to(self, ids: list[int], text: str) -> bool:
        """Whether tokens are those of the text; what normalizing changes, it changes alike."""
        decoded = self._decode(ids)
        if decoded == text:
            return True
        (whole,) = self._encode([text], special=self._adds_special)
        return bool(decoded == self._decode(whole))

    def _whole(self, text: MarkedText, pieces: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """The tokens of the whole text, cut at the borders.

        Raises:
            BadRowError: a token straddles a border.
        """
        (whole,) = self._encode([text.text], special=self._adds_special)
        ids, place, taken = [], 0, 0
        for piece, _ in pieces[:-1]:
            place += len(piece)
            (before,) = self._encode([text.text[:place]], special=self._adds_special)
            if whole[: len(before)] != before:
                raise BadRowError(
                    "a token straddles the border between prompt and answer, at "
                    f"{text.text[max(0, place - 20) : place]!r} and "
                    f"{text.text[place : place + 20]!r}"
                )
            ids.append(whole[taken : len(before)])
            taken = len(before)
        return [*ids, whole[taken:]]

    def _end_of_sequence(self) -> int:
        token = getattr(self._tokenizer, "eos_token_id", None)
        if token is None:
            raise BadRowError(
                "nothing ends the answer: the template writes no end-of-turn token, and the "
                "tokenizer has no end of sequence"
            )
        return int(token)

    def _encode(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=special, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _decode(self, ids: list[int]) -> Any:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _pieces(text: MarkedText) -> list[tuple[str, bool]]:
    """The text cut at the borders of its spans: (piece, whether it is learned)."""
    pieces, place = [], 0
    for start, end in text.spans:
        pieces += [(text.text[place:start], False), (text.text[start:end], True)]
        place = end
    return pieces
