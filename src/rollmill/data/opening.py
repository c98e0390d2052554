"""The way in: a configuration becomes a source of prompts, or of recorded answers."""

from __future__ import annotations

from pathlib import Path

from rollmill.config.data import DatasetConfig
from rollmill.data.demonstrations import load_demonstrations
from rollmill.data.loading import load_dataset
from rollmill.data.recorded import DemonstrationSource
from rollmill.data.source import BufferPolicy, PromptSource, oldest_first
from rollmill.data.template import Tokenizer


def open_source(
    config: DatasetConfig,
    *,
    tokenizer: Tokenizer,
    n_samples_per_prompt: int,
    seed: int,
    context_length: int | None,
    base_dir: Path,
    buffer_policy: BufferPolicy | None = None,
) -> PromptSource:
    """Read the data set and stand before its first prompt (with its answer, given `data.sft`).

    Args:
        config: the `data` section.
        tokenizer: the model's, see `load_tokenizer`.
        n_samples_per_prompt: samples per group.
        seed: the run's; seeds the shuffle and procedural tasks without a seed of their own.
        context_length: most tokens of prompt and response together; None for no limit.
        base_dir: folder of the configuration file: relative paths that are not found from the
            current directory are looked for there.
        buffer_policy: which unfinished groups come back first; None is oldest first.

    Raises:
        DataError: the data cannot be used; see `load_dataset` and `load_demonstrations`.
    """
    if config.sft is not None:
        recorded = load_demonstrations(
            config, tokenizer=tokenizer, context_length=context_length, base_dir=base_dir
        )
        return DemonstrationSource(recorded, tokenizer, seed=seed, shuffle=config.shuffle)
    dataset = load_dataset(
        config, tokenizer=tokenizer, context_length=context_length, base_dir=base_dir, seed=seed
    )
    return PromptSource(
        dataset,
        n_samples_per_prompt=n_samples_per_prompt,
        seed=seed,
        shuffle=config.shuffle,
        buffer_policy=buffer_policy or oldest_first,
    )
