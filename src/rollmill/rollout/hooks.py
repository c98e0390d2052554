"""The functions that users plug into rollouts: loaded and checked before the run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollmill.config.data import DatasetConfig
from rollmill.config.rollout import RolloutHooks
from rollmill.data.source import BufferPolicy, DataSource
from rollmill.data.template import Tokenizer
from rollmill.errors import HookError
from rollmill.hooks import HookSignature, load_hook
from rollmill.rollout.generate import Generate, generate_single_turn
from rollmill.rollout.group import Overrides, SampleHook
from rollmill.sample import Group

if TYPE_CHECKING:
    from rollmill.rollout.custom import RolloutFunction
    from rollmill.rollout.evaluate import EvaluationFunction


@dataclass(frozen=True)
class SourceContext:
    """What a data source is made from.

    Attributes:
        config: the `data` section.
        tokenizer: the model's tokenizer.
        n_samples_per_prompt: samples per group.
        seed: the run's.
        context_length: most tokens of prompt and response together.
        base_dir: folder of the configuration file.
        buffer_policy: the configured order of unfinished groups; None is oldest first.
    """

    config: DatasetConfig
    tokenizer: Tokenizer
    n_samples_per_prompt: int
    seed: int
    context_length: int
    base_dir: Path
    buffer_policy: BufferPolicy | None


class GroupsHook(Protocol):
    """Sample filter and reward post-processor: change the samples in place."""

    def __call__(self, groups: list[Group]) -> None:
        """Gets the batch, ascending by group index."""


class AllSamplesHook(Protocol):
    """The all-samples processor."""

    def __call__(self, kept: list[Group], rejected: list[Group]) -> None:
        """Gets the batch, and the groups that were rejected or failed."""


class BatchConverter(Protocol):
    """The sample→batch converter."""

    def __call__(self, groups: list[Group]) -> list[Group]:
        """The same groups and attempts, with the samples that are to be trained on."""


class LogRollout(Protocol):
    """The log function of batches."""

    def __call__(self, groups: list[Group]) -> dict[str, float]:
        """Extra metrics of the batch."""


class LogEval(Protocol):
    """The log function of evaluations."""

    def __call__(self, name: str, groups: list[Group]) -> dict[str, float]:
        """Extra metrics of one set, written as `eval/NAME/…`."""


class MakeSource(Protocol):
    """The data source hook."""

    def __call__(self, context: SourceContext) -> DataSource:
        """The source of prompts."""


GENERATE = HookSignature(
    ("sample: Sample", "context: GenerateContext"), "Sample | list[Sample]", "async"
)
SAMPLE = HookSignature(("sample: Sample",), "None")
SIGNATURES = {
    "generate": GENERATE,
    "sample": SAMPLE,
    "sample_filter": HookSignature(("groups: list[Group]",), "None", "sync"),
    "reward_post_process": HookSignature(("groups: list[Group]",), "None", "sync"),
    "all_samples": HookSignature(("kept: list[Group]", "rejected: list[Group]"), "None", "sync"),
    "batch_converter": HookSignature(("groups: list[Group]",), "list[Group]", "sync"),
    "log_rollout": HookSignature(("groups: list[Group]",), "dict[str, float]", "sync"),
    "log_eval": HookSignature(("name: str", "groups: list[Group]"), "dict[str, float]", "sync"),
    "buffer_policy": HookSignature(("waiting: list[Group]", "n: int"), "list[Group]", "sync"),
    "data_source": HookSignature(("context: SourceContext",), "DataSource", "sync"),
    "rollout": HookSignature(("context: RolloutContext",), "list[Group]", "async"),
    "evaluation": HookSignature(("context: EvaluationContext",), "dict[str, float]", "async"),
}
"""What each function of `rollout.hooks` is called with."""


@dataclass(frozen=True)
class LoadedHooks:
    """The run's own functions, or the built-in ones. Fields are named as in `rollout.hooks`."""

    generate: Generate = generate_single_turn
    sample: SampleHook | None = None
    sample_filter: GroupsHook | None = None
    reward_post_process: GroupsHook | None = None
    all_samples: AllSamplesHook | None = None
    batch_converter: BatchConverter | None = None
    log_rollout: LogRollout | None = None
    log_eval: LogEval | None = None
    buffer_policy: BufferPolicy | None = None
    data_source: MakeSource | None = None
    rollout: RolloutFunction | None = None
    evaluation: EvaluationFunction | None = None


def load_hooks(config: RolloutHooks, base_dir: Path) -> LoadedHooks:
    """Load every configured hook.

    Raises:
        HookError: one cannot be found, or cannot be called as its hook requires.
    """
    loaded: dict[str, Any] = {}
    for name, expected in SIGNATURES.items():
        path = getattr(config, name)
        if path is not None:
            where = f"rollout.hooks.{name}"
            loaded[name] = load_hook(path, base_dir=base_dir, expected=expected, name=where)
    return LoadedHooks(**loaded)


def load_generate(path: str | None, *, base_dir: Path, name: str, default: Generate) -> Generate:
    """A generate hook by path, or `default` when the path is None."""
    if path is None:
        return default
    function: Generate = load_hook(path, base_dir=base_dir, expected=GENERATE, name=name)
    return function


def generate_overrides(base_dir: Path) -> Overrides:
    """Finds the generate functions that samples name, each loaded and checked once.

    The returned function raises HookError for a name that cannot be loaded or called.
    """

    @cache
    def find(path: str) -> Generate:
        where = "Sample.generate_function"
        return load_generate(path, base_dir=base_dir, name=where, default=generate_single_turn)

    return find


def make_source(hook: MakeSource, context: SourceContext) -> DataSource:
    """The user's data source, checked.

    Raises:
        HookError: making it raised, or it lacks a method that a source has.
    """
    try:
        source = hook(context)
    except Exception as error:
        raise HookError(
            "making the data source raised",
            where="rollout.hooks.data_source",
            found=f"{type(error).__name__}: {error}",
            fix="mend the function; it is called as a run starts",
        ) from error
    wanted: Sequence[str] = (
        "take", "give_back", "new_index", "state_dict", "load_state_dict", "__len__",
    )  # fmt: skip
    missing = [name for name in wanted if not callable(getattr(source, name, None))]
    if missing:
        raise HookError(
            "the data source lacks methods",
            where="rollout.hooks.data_source",
            expected="take, give_back, new_index, state_dict, load_state_dict, __len__",
            found=f"a {type(source).__name__} without {', '.join(missing)}",
            fix="add the methods: docs/data.md lists them",
        )
    return source
