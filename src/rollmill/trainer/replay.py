"""A recorded step again, as it was and with other settings: what would have been different?

No engine and no reward is needed: the samples of the step come from its Parquet file, the weights
from a model folder or a checkpoint. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import DataError
from rollmill.sample import Group, Sample
from rollmill.sample_codec import encode_group, row_to_sample
from rollmill.trainer.worker import TorchTrainer


@dataclass(frozen=True)
class ReplayReport:
    """Two runs of one step, from the same weights on the same samples.

    Attributes:
        recorded: metrics with the settings as they were.
        changed: metrics with the other settings.
        update_cosine: cosine between both changes of the weights; NaN when one is zero.
        update_norms: Euclidean length of both.
    """

    recorded: dict[str, float]
    changed: dict[str, float]
    update_cosine: float
    update_norms: tuple[float, float]

    def differences(self) -> list[tuple[str, float | None, float | None]]:
        """(name, recorded, changed) of every metric that differs, times left out, sorted."""
        names = sorted(self.recorded.keys() | self.changed.keys())
        rows = [(name, self.recorded.get(name), self.changed.get(name)) for name in names]
        return [row for row in rows if row[1] != row[2] and not is_timing(row[0])]


def is_timing(name: str) -> bool:
    """Whether a metric is about time, and so never the same twice."""
    return name.startswith("seconds/") or "per_second" in name or name == "mfu"


def read_groups(path: Path) -> list[Group]:
    """The groups of a recorded step, in the order they were trained.

    Raises:
        DataError: the file is missing or is not a file of samples.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            "the recorded samples cannot be read",
            where=str(path),
            expected="a Parquet file of samples that a run wrote",
            found=str(error),
        ) from error
    groups: dict[int, list[Sample]] = {}
    for row in rows:
        sample = row_to_sample(row)
        groups.setdefault(sample.group_index, []).append(sample)
    return [Group(index, samples) for index, samples in groups.items()]


def replay(
    groups: Sequence[Group],
    recorded: TrainerConfig,
    changed: TrainerConfig,
    *,
    model_path: str,
    state: Path | None = None,
    changed_groups: Sequence[Group] | None = None,
    changed_reward_key: str | None = None,
    **arguments: Any,
) -> ReplayReport:
    """Take the step with both settings and compare.

    Args:
        groups: the samples of the step.
        recorded: the settings as they were.
        changed: the other settings.
        model_path: folder of the model.
        state: what `TorchTrainer.save` wrote before the step; None starts from the folder. Other
            settings that train other tensors (LoRA) cannot start from it.
        changed_groups: other samples for the other settings (another filter); None takes `groups`.
        changed_reward_key: which reward part the other settings train on; None is the same.
        arguments: `step`, `reward_key`, `max_new_tokens`, `temperature` as in `TorchTrainer.train`,
            `num_total_steps` and `context_length` as in its constructor, and optionally `seed` and
            `opd`.
    """
    first, first_update = _take_step(groups, recorded, model_path, state, arguments)
    other = groups if changed_groups is None else changed_groups
    if changed_reward_key is not None:
        arguments = {**arguments, "reward_key": changed_reward_key}
    second, second_update = _take_step(other, changed, model_path, state, arguments)
    norms = float(first_update.double().norm()), float(second_update.double().norm())
    product = float(first_update.double() @ second_update.double())
    cosine = product / (norms[0] * norms[1]) if all(norms) else float("nan")
    return ReplayReport(first, second, cosine, norms)


def _take_step(
    groups: Sequence[Group],
    config: TrainerConfig,
    model_path: str,
    state: Path | None,
    arguments: dict[str, Any],
) -> tuple[dict[str, float], Tensor]:
    """Metrics and change of the weights, flat float32 [parameters]."""
    rest = dict(arguments)
    trainer = TorchTrainer(
        config=config.model_dump(mode="json"),
        model_path=model_path,
        seed=rest.pop("seed", 0),
        opd=rest.pop("opd", None),
        num_total_steps=rest.pop("num_total_steps"),
        context_length=rest.pop("context_length"),
    )
    if state is not None:
        trainer.load(str(state))
    before = _flat(trainer)
    metrics = trainer.train([encode_group(group) for group in groups], **rest)
    return metrics, _flat(trainer) - before


def _flat(trainer: TorchTrainer) -> Tensor:
    return torch.cat([parameter.flatten().cpu() for parameter in trainer.parameters()])
