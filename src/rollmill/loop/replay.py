"""`rollmill replay`: a recorded step again, with other trainer settings, and what would differ.

Needs the run's folder only: the samples of the step, and the weights before it. No engine and no
reward runs, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollmill.config import Config
from rollmill.config.load import apply_override, load_config, parse_config, to_plain
from rollmill.errors import CheckpointError, ConfigError, DataError
from rollmill.filters import DynamicFilter
from rollmill.loop.run_dir import RunDir
from rollmill.loop.state import TRAINER_STATE
from rollmill.models import context_length_of, resolve_model
from rollmill.sample import Group
from rollmill.telemetry.metrics_log import read_metrics
from rollmill.trainer.checkpoint import newest_checkpoint

FILTER_PREFIX = "rollout.filters."
OVERRIDABLE = ("trainer.", FILTER_PREFIX, "reward.reward_key")
"""What can be changed: the rest has happened already."""


@dataclass(frozen=True)
class Start:
    """The weights that a replay starts from.

    Attributes:
        state: the trainer's part of a checkpoint; None takes the model's folder.
        is_exact: whether they are the weights that the recorded step started from.
        text: what to tell the user.
    """

    state: Path | None
    is_exact: bool
    text: str


def replay_run(run: Path, step: int, overrides: Sequence[str]) -> None:
    """Take step `step` of `run` again, as it was and with `overrides`, and print both.

    The files of custom functions are looked up from the current folder.

    Raises:
        ConfigError: an override is not one of the trainer's or a filter's, or wrong.
        CheckpointError: `run` is no run folder.
        DataError: the step was not recorded.
    """
    run_dir = RunDir(run)
    recorded = _recorded_config(run_dir)
    changed = _changed_config(recorded, overrides)
    recording = _recording(run_dir, step)
    from rollmill.trainer.replay import read_groups, replay  # loads torch: after what is quick

    groups = read_groups(recording)
    start = find_start(run_dir, step)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"step {step}: {len(groups)} groups; weights: {start.text}")
    report = replay(
        groups,
        recorded.trainer,
        changed.trainer,
        model_path=str(resolve_model(recorded.model.path, needs_tokenizer=False)),
        state=start.state,
        changed_groups=_filtered(groups, changed) if _has_filter(overrides) else None,
        changed_reward_key=changed.reward.reward_key,
        step=step,
        reward_key=recorded.reward.reward_key,
        max_new_tokens=recorded.rollout.sampling.max_new_tokens,
        temperature=recorded.training_temperature,
        opd=recorded.opd.model_dump(mode="json"),
        num_total_steps=recorded.run.num_steps,
        context_length=_context_length(recorded),
        seed=recorded.run.seed,
    )
    written = _written_metrics(run_dir, step)
    _show(console, written, report.recorded, report.changed)
    _show_update(console, report.update_cosine, report.update_norms)


def find_start(run_dir: RunDir, step: int) -> Start:
    """The weights that `step` started from when they are there, else the newest earlier ones.

    Raises:
        CheckpointError: there are earlier checkpoints and all are damaged.
    """
    wanted = step - 1
    found = newest_checkpoint(run_dir.checkpoints, at_most=wanted) if wanted else None
    state = None if found is None else found.path / TRAINER_STATE
    name = "the starting model" if found is None else f"the checkpoint of step {found.step}"
    if wanted == (0 if found is None else found.step):
        return Start(state, True, f"{name}, which the step started from")
    return Start(
        state,
        False,
        f"{name}, NOT those that the step started from: there is no checkpoint of step {wanted}. "
        "What depends on the weights will differ from the run",
    )


def _recorded_config(run_dir: RunDir) -> Config:
    if not run_dir.config.is_file():
        raise CheckpointError(
            "this is no run folder",
            where=str(run_dir.root),
            expected="a folder with config.yaml",
            fix="give the run.dir of a training run",
        )
    return load_config(run_dir.config)


def _changed_config(recorded: Config, overrides: Sequence[str]) -> Config:
    values = to_plain(recorded)
    for override in overrides:
        if not override.startswith(OVERRIDABLE):
            raise ConfigError(
                "a replay cannot change this: it has happened already",
                where=override,
                expected="trainer.…, rollout.filters.… or reward.reward_key",
                fix="change trainer.*, rollout.filters.* or reward.reward_key",
            )
        apply_override(values, override)
    return parse_config(values, where="the run's config.yaml with your changes")


def _recording(run_dir: RunDir, step: int) -> Path:
    path = run_dir.samples / f"step_{step:06d}.parquet"
    if path.is_file():
        return path
    steps = sorted(
        int(p.stem.removeprefix("step_")) for p in run_dir.samples.glob("step_*.parquet")
    )
    raise DataError(
        "that step was not recorded",
        where=str(path),
        expected=f"a step from {steps[0]} to {steps[-1]}" if steps else "recorded samples",
        found=str(step),
        fix="choose one of those" if steps else "run with telemetry.dump_samples: true",
    )


def _has_filter(overrides: Sequence[str]) -> bool:
    return any(override.startswith(FILTER_PREFIX) for override in overrides)


def _filtered(groups: Sequence[Group], config: Config) -> list[Group]:
    keep = DynamicFilter(
        config.rollout.filters, reward_key=config.reward.reward_key, base_dir=Path.cwd()
    )
    kept = [group for group in groups if keep(group).keep]
    if not kept:
        raise ConfigError(
            "the filter leaves nothing to train on",
            where="rollout.filters",
            found=keep.name,
            fix="loosen the filter, or replay another step",
        )
    return kept


def _context_length(config: Config) -> int:
    folder = resolve_model(config.model.path, needs_tokenizer=False)
    return config.model.context_length or context_length_of(folder) or 1 << 30


def _written_metrics(run_dir: RunDir, step: int) -> dict[str, float]:
    """What the run itself wrote down about the step; nothing when that is lost."""
    if not run_dir.metrics.is_file():
        return {}
    for record in read_metrics(run_dir.metrics):
        if record.get("kind") == "train" and record.get("step") == step:
            return {
                name.removeprefix("train/"): value
                for name, value in record.items()
                if name.startswith("train/")
            }
    return {}


def _rows(
    written: dict[str, float], again: dict[str, float], changed: dict[str, float]
) -> Iterator[tuple[str, float | None, float | None, float | None]]:
    from rollmill.trainer.replay import is_timing

    for name in sorted(again.keys() | changed.keys()):
        if not is_timing(name):
            yield name, written.get(name), again.get(name), changed.get(name)


def _show(
    console: Console,
    written: dict[str, float],
    again: dict[str, float],
    changed: dict[str, float],
) -> None:
    table = Table(show_edge=False)
    table.add_column("metric")
    for title in ("in the run", "recomputed", "changed", "difference"):
        table.add_column(title, justify="right")
    for name, first, second, third in _rows(written, again, changed):
        gap = None if second is None or third is None else third - second
        table.add_row(name, _number(first), _number(second), _number(third), _gap(gap))
    console.print(table)


def _show_update(console: Console, cosine: float, norms: tuple[float, float]) -> None:
    console.print(f"length of the update: {norms[0]:.4g} recomputed, {norms[1]:.4g} changed")
    if not all(norms):
        console.print("cosine of both updates: none, one of them is zero")
    else:
        console.print(f"cosine of both updates: {cosine:.6f}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _gap(value: float | None) -> str:
    return "" if not value else f"{value:+.3g}"
