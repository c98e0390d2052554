"""Handing out recorded answers in finished groups, for as long as anyone asks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rollmill.data.demonstrations import Demonstration, DemonstrationSet
from rollmill.data.loading import Dataset
from rollmill.data.prompts import PromptRow
from rollmill.data.source import PromptSource
from rollmill.data.template import Tokenizer
from rollmill.sample import IntArray, Sample, Status


class DemonstrationSource(PromptSource):
    """Finished groups of one recorded answer each, for as long as anyone asks; a `DataSource`.

    Args:
        demonstrations: the rows.
        tokenizer: decodes what people see.
        seed: of the shuffle.
        shuffle: a new permutation of the original order every epoch.
    """

    def __init__(
        self,
        demonstrations: DemonstrationSet,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(
            Dataset(demonstrations.parts), n_samples_per_prompt=1, seed=seed, shuffle=shuffle
        )
        self._tokenizer = tokenizer
        self._fingerprints = [_fingerprint(part.rows) for part in demonstrations.parts]

    def _fresh_sample(self, row: PromptRow, attempt: int) -> Sample:
        """A sample that has its answer already."""
        sample = super()._fresh_sample(row, attempt)
        if not isinstance(row, Demonstration):
            raise TypeError(f"expected a Demonstration, found {type(row).__name__}")
        sample.prompt = self._decode(row.prompt_tokens)
        sample.response = self._decode(row.answer_tokens)
        sample.segments = row.segments
        sample.status = Status.TRUNCATED if row.is_truncated else Status.COMPLETED
        return sample

    def _decode(self, tokens: IntArray) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def _fingerprint(rows: Sequence[PromptRow]) -> str:
    """A hash over all tokens and masks of the rows in order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        if isinstance(row, Demonstration):
            for array in (row.prompt_tokens, row.answer_tokens, row.mask):
                digest.update(len(array).to_bytes(8, "little"))
                digest.update(array.tobytes())
    return digest.hexdigest()
