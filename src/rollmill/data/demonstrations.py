"""A data set of recorded answers, read, checked and tokenized before the first step.

As with prompts, every problem shows at start-up: a bad row stops (or is skipped and counted, by
`data.bad_rows`), and so is a conversation that is too long (`data.sft.too_long`). Nothing is ever
dropped or cut silently. What is kept of a row is its token ids.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.config.data import DatasetConfig
from rollmill.config.sft import SftConfig
from rollmill.data.conversations import ConversationReader
from rollmill.data.loading import Part, bad_row_error, check_named_keys, raw_parts
from rollmill.data.marked_tokens import MarkedTokenizer, MarkedTokens
from rollmill.data.masks import MarkedText
from rollmill.data.prompts import PromptRow
from rollmill.data.readers import BadRowError, RawRow
from rollmill.data.template import Tokenizer
from rollmill.errors import DataError
from rollmill.sample import BoolArray, IntArray, Segment, int_array

logger = logging.getLogger(__name__)

_SHOWN_REASONS = 3
_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Demonstration(PromptRow):
    """A prompt with the answer to learn. `prompt` is empty: its tokens say it.

    Attributes:
        answer_tokens: int32 [R], from the first learned token on.
        mask: bool [R]: the tokens to learn; the first one is.
        is_truncated: the end was cut off.
    """

    answer_tokens: IntArray = field(default_factory=lambda: int_array([]))
    mask: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    is_truncated: bool = False

    @property
    def segments(self) -> list[Segment]:
        """The answer, cut where learned and other tokens meet."""
        borders = [0, *(np.flatnonzero(np.diff(self.mask)) + 1).tolist(), len(self.mask)]
        return [
            Segment.from_data(self.answer_tokens[start:stop])
            if self.mask[start]
            else Segment.from_environment(self.answer_tokens[start:stop])
            for start, stop in pairwise(borders)
        ]


@dataclass(slots=True)
class DemonstrationSet:
    """The usable rows, and what was left out or cut.

    Attributes:
        max_tokens: limit of a sample; None for no limit.
        parts: one, or one per path when `data.path` gives mixing weights.
        num_read: rows in the files.
        num_bad: rows skipped because they could not be used (`bad_rows: skip`).
        num_too_long: samples left out for their length.
        num_truncated: samples whose end was cut off.
        reasons: of the first bad rows.
        longest: tokens of the longest sample that is over the limit.
    """

    max_tokens: int | None
    parts: tuple[Part, ...] = ()
    num_read: int = 0
    num_bad: int = 0
    num_too_long: int = 0
    num_truncated: int = 0
    reasons: list[str] = field(default_factory=list)
    longest: int = 0

    @property
    def rows(self) -> list[Demonstration]:
        """All rows in data set order."""
        return [row for part in self.parts for row in part.rows if isinstance(row, Demonstration)]


def load_demonstrations(
    config: DatasetConfig,
    *,
    tokenizer: Tokenizer,
    context_length: int | None = None,
    base_dir: Path | None = None,
) -> DemonstrationSet:
    """Read, check and tokenize recorded answers.

    Args:
        config: the `data` section; `data.sft` says where the answers are.
        tokenizer: the model's.
        context_length: most tokens of a sample, besides `data.sft.max_tokens`; None for no limit.
        base_dir: where relative paths are looked for when the current directory has no such file.

    Raises:
        DataError: a row cannot be used or is too long (unless the configuration says otherwise),
            or nothing is left.
    """
    sft = config.sft or SftConfig()
    limits = [limit for limit in (sft.max_tokens, context_length) if limit is not None]
    tally = DemonstrationSet(min(limits, default=None))
    reader = _Reader(config, sft, tokenizer, tally)
    tally.parts = tuple(
        Part(name, reader.usable(name, raw), weight)
        for name, raw, weight in raw_parts(config, base_dir or Path(), seed=0)
    )
    _report(tally)
    return tally


class _Reader:
    """Raw rows in, demonstrations out, the rest into the tally."""

    def __init__(
        self, config: DatasetConfig, sft: SftConfig, tokenizer: Tokenizer, tally: DemonstrationSet
    ) -> None:
        self._config = config
        self._sft = sft
        self._reader = ConversationReader(config, sft, tokenizer)
        self._tokenizer = MarkedTokenizer(tokenizer, adds_special=not config.apply_chat_template)
        self._tally = tally

    def usable(self, name: str, raw_rows: Iterator[RawRow]) -> tuple[Demonstration, ...]:
        """All usable rows of one part, in order; DataError when there is none."""
        rows: list[Demonstration] = []
        fields_seen = set[str]()
        while chunk := list(islice(raw_rows, _CHUNK_ROWS)):
            rows.extend(self._usable_chunk(chunk, fields_seen))
        if not rows:
            raise _nothing_usable(name, self._tally)
        check_named_keys(name, self._config, fields_seen)
        return tuple(rows)

    def _usable_chunk(self, chunk: list[RawRow], fields_seen: set[str]) -> Iterator[Demonstration]:
        texts: list[tuple[str, MarkedText, dict[str, Any]]] = []
        for raw in chunk:
            self._tally.num_read += 1
            try:
                record = raw.load()
                fields_seen.update(record)
                marked, metadata = self._reader.read(record)
                texts += [
                    (_place(raw.where, number, len(marked)), text, metadata)
                    for number, text in enumerate(marked, start=1)
                ]
            except BadRowError as reason:
                self._refuse(raw.where, reason)
        all_tokens = self._tokenizer.tokens([text for _, text, _ in texts])
        for (where, _, metadata), tokens in zip(texts, all_tokens, strict=True):
            if isinstance(tokens, BadRowError):
                self._refuse(where, tokens)
            elif (row := self._row(where, tokens, metadata)) is not None:
                yield row

    def _row(
        self, where: str, tokens: MarkedTokens, metadata: dict[str, Any]
    ) -> Demonstration | None:
        """The sample, cut where needed; None when it is left out."""
        length, limit = len(tokens.tokens), self._tally.max_tokens
        is_long = limit is not None and length > limit
        if is_long:
            self._tally.longest = max(self._tally.longest, length)
            if self._sft.too_long == "stop":
                raise _too_long(where, length, limit or 0)
        ids, mask = tokens.tokens[:limit], tokens.mask[:limit]
        if not mask.any() or (is_long and self._sft.too_long == "skip"):
            self._tally.num_too_long += 1
            return None
        self._tally.num_truncated += is_long
        first = int(np.argmax(mask))
        if first == 0:
            self._refuse(where, BadRowError("the prompt has no tokens"))
            return None
        return Demonstration(
            prompt="",
            prompt_tokens=int_array(ids[:first]),
            metadata=metadata,
            row_id=where,
            answer_tokens=int_array(ids[first:]),
            mask=mask[first:],
            is_truncated=is_long,
        )

    def _refuse(self, where: str, reason: BadRowError) -> None:
        if self._config.bad_rows == "stop":
            raise bad_row_error(where, reason) from reason
        self._tally.num_bad += 1
        if len(self._tally.reasons) < _SHOWN_REASONS:
            self._tally.reasons.append(f"{where}: {reason}")


def _place(where: str, number: int, num_samples: int) -> str:
    """What a sample is called: its row, and which one it is when the row gives several."""
    return where if num_samples == 1 else f"{where} (turn {number} of {num_samples})"


def _too_long(where: str, length: int, limit: int) -> DataError:
    return DataError(
        "a recorded conversation is too long",
        where=where,
        expected=f"at most {limit} tokens (data.sft.max_tokens, model.context_length)",
        found=str(length),
        fix="raise the limit, or set data.sft.too_long to skip or truncate",
    )


def _nothing_usable(name: str, tally: DemonstrationSet) -> DataError:
    reasons = "; ".join(tally.reasons)
    return DataError(
        "no row of the data set can be used",
        where=name,
        expected="at least one conversation with a turn to learn",
        found=f"{tally.num_read} rows, {tally.num_bad} of them bad; {tally.num_too_long} samples "
        f"longer than {tally.max_tokens} tokens" + (f" ({reasons})" if reasons else ""),
        fix="mend the rows, the keys of data.sft, or the limit",
    )


def _report(tally: DemonstrationSet) -> None:
    if tally.num_bad:
        shown = "; ".join(tally.reasons)
        logger.warning("left out %d of %d rows: %s", tally.num_bad, tally.num_read, shown)
    if tally.longest:
        logger.warning(
            "left out %d and cut %d conversations longer than %s tokens (up to %d)",
            tally.num_too_long,
            tally.num_truncated,
            tally.max_tokens,
            tally.longest,
        )
