"""The functions that users plug into rollouts: loaded and checked before the run starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.config.rollout import RolloutHooks
from rollmill.hooks import HookSignature, load_hook
from rollmill.rollout.generate import Generate, generate_single_turn
from rollmill.rollout.group import SampleHook
from rollmill.sample import Group

GENERATE = HookSignature(
    ("sample: Sample", "context: GenerateContext"), "Sample | list[Sample]", "async"
)
SAMPLE = HookSignature(("sample: Sample",), "None")
GROUPS = HookSignature(("groups: list[Group]",), "None", "sync")
METRICS = HookSignature(("groups: list[Group]",), "dict[str, float]", "sync")
POLICY = HookSignature(("waiting: list[Group]", "n: int"), "list[Group]", "sync")


@dataclass(frozen=True)
class LoadedHooks:
    """The run's own functions, or the built-in ones."""

    generate: Generate
    sample: SampleHook | None
    sample_filter: Callable[[list[Group]], None] | None
    reward_post_process: Callable[[list[Group]], None] | None
    all_samples: Callable[[list[Group], list[Group]], None] | None
    buffer_policy: Callable[[list[Group], int], list[Group]] | None
    log_rollout: Callable[[list[Group]], dict[str, float]] | None


ALL_SAMPLES = HookSignature(("kept: list[Group]", "rejected: list[Group]"), "None", "sync")


def load_hooks(config: RolloutHooks, base_dir: Path) -> LoadedHooks:
    """Load every configured hook.

    Raises:
        HookError: one cannot be found, or cannot be called as its hook requires.
    """

    def load(name: str, expected: HookSignature) -> Any:
        path = getattr(config, name)
        if path is None:
            return None
        where = f"rollout.hooks.{name}"
        return load_hook(path, base_dir=base_dir, expected=expected, name=where)

    return LoadedHooks(
        generate=load("generate", GENERATE) or generate_single_turn,
        sample=load("sample", SAMPLE),
        sample_filter=load("sample_filter", GROUPS),
        reward_post_process=load("reward_post_process", GROUPS),
        all_samples=load("all_samples", ALL_SAMPLES),
        buffer_policy=load("buffer_policy", POLICY),
        log_rollout=load("log_rollout", METRICS),
    )


def load_generate(path: str | None, *, base_dir: Path, name: str, default: Generate) -> Generate:
    """A generate hook by path, or `default` when the path is None."""
    if path is None:
        return default
    function: Generate = load_hook(path, base_dir=base_dir, expected=GENERATE, name=name)
    return function
