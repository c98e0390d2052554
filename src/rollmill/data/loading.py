"""A whole data set, read, checked, rendered and counted, before the first rollout.

Every problem with the data shows at start-up: a bad row stops (or is skipped and counted, by
`data.bad_rows`), a prompt that leaves no room for an answer is left out and counted, and a data
set with nothing left is an error. Nothing is ever dropped silently.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rollmill.config.data import DatasetConfig
from rollmill.data.paths import find_entry
from rollmill.data.prompts import PromptRow, RowFields, read_prompt
from rollmill.data.readers import BadRowError, RawRow, read_rows
from rollmill.data.reasoning_gym import TASK_CONFIG, task_rows
from rollmill.data.template import PromptRenderer, Tokenizer
from rollmill.errors import DataError

logger = logging.getLogger(__name__)

_SHOWN_REASONS = 3
_CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are mixed as one: a path with a mixing weight, or everything."""

    name: str
    rows: tuple[PromptRow, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """The usable rows of a data set and what was left out.

    Attributes:
        parts: one, or one per path when `data.path` gives mixing weights.
        num_bad: rows skipped because they could not be used (`bad_rows: skip`).
        num_too_long: rows left out because their prompt is over `max_prompt_tokens`.
        max_prompt_tokens: that limit.
    """

    parts: tuple[Part, ...]
    num_bad: int = 0
    num_too_long: int = 0
    max_prompt_tokens: int | None = None

    @property
    def rows(self) -> list[PromptRow]:
        """All rows in data set order."""
        return [row for part in self.parts for row in part.rows]


@dataclass(slots=True)
class _Tally:
    """What was left out so far, with the first few reasons."""

    max_prompt_tokens: int | None
    num_read: int = 0
    bad: list[str] = field(default_factory=list)
    num_bad: int = 0
    too_long: list[int] = field(default_factory=list)

    def skip_bad(self, where: str, reason: object) -> None:
        self.num_bad += 1
        if self.num_bad <= _SHOWN_REASONS:
            self.bad.append(f"{where}: {reason}")


def load_rows(
    config: DatasetConfig,
    *,
    tokenizer: Tokenizer,
    context_length: int | None = None,
    base_dir: Path | None = None,
    seed: int = 0,
) -> list[PromptRow]:
    """The usable rows in data set order, for evaluation; see `load_dataset`."""
    return load_dataset(
        config, tokenizer=tokenizer, context_length=context_length, base_dir=base_dir, seed=seed
    ).rows


def load_dataset(
    config: DatasetConfig,
    *,
    tokenizer: Tokenizer,
    context_length: int | None = None,
    base_dir: Path | None = None,
    seed: int = 0,
) -> Dataset:
    """Read, check and render a data set.

    Args:
        config: the `data` section (or that of an evaluation set).
        tokenizer: the model's.
        context_length: most tokens of prompt and response together; a prompt may take all but
            one. None sets no limit besides `max_prompt_tokens`.
        base_dir: where relative paths are looked for when the current directory has no such file.
        seed: seeds a reasoning-gym task that has no seed of its own.

    Raises:
        DataError: a bad row (unless skipped), an empty data set, or only prompts that are too
            long; the message says where, why and what to do.
    """
    tally = _Tally(_prompt_limit(config, context_length))
    renderer = PromptRenderer(config, tokenizer)
    parts = tuple(
        Part(name, _PartReader(name, config, renderer, tally).usable(raw), weight)
        for name, raw, weight in raw_parts(config, base_dir or Path(), seed)
    )
    _report(tally)
    return Dataset(parts, tally.num_bad, len(tally.too_long), tally.max_prompt_tokens)


def _prompt_limit(config: DatasetConfig, context_length: int | None) -> int | None:
    limits = [config.max_prompt_tokens, context_length - 1 if context_length else None]
    return min((limit for limit in limits if limit is not None), default=None)


def raw_parts(
    config: DatasetConfig, base_dir: Path, seed: int
) -> Iterator[tuple[str, Iterator[RawRow], float]]:
    """Name, raw rows (`max_rows` applied) and mixing weight of each part."""
    if config.reasoning_gym is not None:
        rows = task_rows(config.reasoning_gym, config.reasoning_gym_params, seed)
        yield config.reasoning_gym, islice(rows, config.max_rows), 1.0
    elif isinstance(config.path, dict):
        for text, weight in config.path.items():
            yield text, islice(read_rows(find_entry(text, base_dir)), config.max_rows), weight
    else:
        texts = (config.path,) if isinstance(config.path, str) else config.path or ()
        entries = [find_entry(text, base_dir) for text in texts]
        rows = (row for entry in entries for row in read_rows(entry))
        yield ", ".join(texts), islice(rows, config.max_rows), 1.0


class _PartReader:
    """Reads one part: raw rows in, usable rows out, the rest into the tally."""

    def __init__(
        self, name: str, config: DatasetConfig, renderer: PromptRenderer, tally: _Tally
    ) -> None:
        is_task = config.reasoning_gym is not None
        self._keys = config.model_copy(update=dict(TASK_CONFIG)) if is_task else config
        self._name = name
        self._renderer = renderer
        self._tally = tally
        self._fields_seen = set[str]()

    def usable(self, raw_rows: Iterator[RawRow]) -> tuple[PromptRow, ...]:
        """All usable rows, in order; DataError when there is none."""
        num_read, num_long = self._tally.num_read, len(self._tally.too_long)
        rows: list[PromptRow] = []
        while chunk := list(islice(raw_rows, _CHUNK_ROWS)):
            rows.extend(self._usable_chunk(chunk))
        if not rows:
            num_read, too_long = self._tally.num_read - num_read, self._tally.too_long[num_long:]
            raise _nothing_usable(self._name, self._tally, num_read, too_long)
        check_named_keys(self._name, self._keys, self._fields_seen)
        return tuple(rows)

    def _usable_chunk(self, chunk: list[RawRow]) -> Iterator[PromptRow]:
        readable = [rendered for raw in chunk if (rendered := self._render(raw)) is not None]
        all_tokens = self._renderer.tokens([text for _, _, text in readable])
        limit = self._tally.max_prompt_tokens
        for (where, fields, _), tokens in zip(readable, all_tokens, strict=True):
            if len(tokens) == 0:
                self._refuse(where, BadRowError("the prompt has no tokens"))
            elif limit is not None and len(tokens) > limit:
                self._tally.too_long.append(len(tokens))
            else:
                yield PromptRow(
                    prompt=fields.prompt,
                    prompt_tokens=tokens,
                    label=fields.label,
                    metadata=fields.metadata,
                    row_id=where,
                    images=fields.images,
                )

    def _render(self, raw: RawRow) -> tuple[str, RowFields, str] | None:
        """Place, fields and prompt text of a row; None when it is bad and may be skipped."""
        self._tally.num_read += 1
        try:
            record = raw.load()
            self._fields_seen.update(record)
            fields = read_prompt(record, self._keys)
            return raw.where, fields, self._renderer.text(fields)
        except BadRowError as reason:
            self._refuse(raw.where, reason)
            return None

    def _refuse(self, where: str, reason: BadRowError) -> None:
        if self._keys.bad_rows == "stop":
            raise bad_row_error(where, reason) from reason
        self._tally.skip_bad(where, reason)


def check_named_keys(name: str, keys: DatasetConfig, fields_seen: set[str]) -> None:
    """Optional fields may be absent, but not one that the user went to the trouble of naming."""
    for option in ("metadata_key", "tools_key", "images_key"):
        key = getattr(keys, option)
        if option in keys.model_fields_set and key is not None and key not in fields_seen:
            raise DataError(
                f"no row has the field {key!r}",
                where=f"data.{option}",
                expected=f"a field of {name}",
                found=", ".join(sorted(fields_seen)),
                fix=f"name one of those, or set {option}: null",
            )


def bad_row_error(where: str, reason: BadRowError) -> DataError:
    """A row that cannot be used, as an error that stops start-up."""
    return DataError(
        "a row of the data cannot be used",
        where=where,
        found=str(reason),
        fix=reason.fix
        or "mend the row, or set bad_rows: skip to leave such rows out and count them",
    )


def _nothing_usable(name: str, tally: _Tally, num_read: int, too_long: list[int]) -> DataError:
    if too_long and len(too_long) == num_read:
        return DataError(
            "every prompt of the data set is too long",
            where=name,
            expected=f"prompts of at most {tally.max_prompt_tokens} tokens",
            found=f"{num_read} prompts of {min(too_long)} to {max(too_long)} tokens",
            fix="raise data.max_prompt_tokens or model.context_length, or shorten the prompts",
        )
    if num_read == 0:
        return DataError(
            "the data set is empty",
            where=name,
            expected="at least one row",
            found="none",
            fix="check the file, the @[a:b] slice and max_rows",
        )
    reasons = "; ".join(tally.bad)
    return DataError(
        "no row of the data set can be used",
        where=name,
        expected="at least one usable row",
        found=f"{num_read} rows: {num_read - len(too_long)} bad, {len(too_long)} too long"
        + (f" ({reasons})" if reasons else ""),
        fix="mend the rows, or the keys that say where prompt and label are",
    )


def _report(tally: _Tally) -> None:
    if tally.num_bad:
        shown = "; ".join(tally.bad)
        logger.warning("left out %d of %d rows: %s", tally.num_bad, tally.num_read, shown)
    if tally.too_long:
        logger.warning(
            "left out %d of %d prompts longer than %s tokens (up to %d)",
            len(tally.too_long),
            tally.num_read,
            tally.max_prompt_tokens,
            max(tally.too_long),
        )
