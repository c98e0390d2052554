"""The policy and the processes that hold it: model folder, tokenizer, engines, trainer."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.cluster.local import LocalWorker
from rollmill.cluster.ranks import RankGroup, Worker
from rollmill.config import Config
from rollmill.data import load_tokenizer
from rollmill.engine.pool import EnginePool
from rollmill.errors import ConfigError, ModelError
from rollmill.loop.run_dir import RunDir
from rollmill.models import context_length_of, resolve_model
from rollmill.rollout.evaluate import Evaluator
from rollmill.rollout.generate import Engines
from rollmill.rollout.hooks import LoadedHooks

TRAINER = "rollmill.trainer.worker:TorchTrainer"
"""What runs in a trainer's process."""


@dataclass(frozen=True)
class Policy:
    """The model's files and limits."""

    folder: Path
    tokenizer: Any
    context_length: int


def open_policy(config: Config) -> Policy:
    """Find the model and its tokenizer.

    Raises:
        ModelError: they are missing or unusable.
        ConfigError: the context length is more than the model has.
    """
    folder = resolve_model(config.model.path, needs_tokenizer=config.model.tokenizer is None)
    tokenizer = load_tokenizer(
        config.model.tokenizer or folder, trust_remote_code=config.model.trust_remote_code
    )
    _check_kind(folder, trust_remote_code=config.model.trust_remote_code)
    limit = context_length_of(folder)
    wanted = config.model.context_length
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(
            "the context length is more than the model's own",
            where="model.context_length",
            expected=f"at most {limit}",
            found=str(wanted),
            fix="lower it, or set it to null to take the model's own",
        )
    length = wanted or limit
    if length is None:
        raise ConfigError(
            "the model does not say how long its context is",
            where="model.context_length",
            expected="a number of tokens",
            found="null",
            fix="set model.context_length",
        )
    return Policy(folder, tokenizer, length)


def _check_kind(folder: Path, *, trust_remote_code: bool) -> None:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            "transformers does not know this kind of model",
            where=str(folder / "config.json"),
            expected="a model_type that the installed transformers has",
            found=(str(error).strip().splitlines() or [type(error).__name__])[0],
            fix="install a newer transformers, or choose another model",
        ) from error


def open_pool(config: Config, policy: Policy, run_dir: RunDir, **options: Any) -> EnginePool:
    """The engines, not started yet; `options` as of `EnginePool`."""
    return EnginePool(
        config.engine,
        model_path=str(policy.folder),
        tokenizer_path=config.model.tokenizer,
        context_length=policy.context_length,
        run_dir=run_dir.root,
        **options,
    )


def open_pools(
    config: Config, policy: Policy, run_dir: RunDir, **options: Any
) -> tuple[EnginePool, EnginePool | None]:
    """The engines of training and those set aside for evaluation (None: there are none)."""
    num_apart = config.eval.num_engines
    if not num_apart:
        return open_pool(config, policy, run_dir, **options), None
    engine = config.engine
    num_left = (len(engine.urls) or engine.num_engines) - num_apart
    training = {"urls": engine.urls[:num_left], "num_engines": num_left}
    evaluation = {"urls": engine.urls[num_left:], "num_engines": num_apart, "router": "none"}
    left, apart = (
        config.model_copy(update={"engine": engine.model_copy(update=changes)})
        for changes in (training, evaluation)
    )
    return (
        open_pool(left, policy, run_dir, **options),
        open_pool(apart, policy, run_dir, **options, first_index=num_left),
    )


def open_evaluator(
    config: Config, policy: Policy, pool: Engines, hooks: LoadedHooks, base_dir: Path
) -> Evaluator:
    """The evaluation sets, read and checked; not started yet."""
    return Evaluator(
        config,
        engines=pool,
        tokenizer=policy.tokenizer,
        context_length=policy.context_length,
        hooks=hooks,
        base_dir=base_dir,
    )


async def start_trainer(
    stack: AsyncExitStack, config: Config, policy: Policy, run_dir: RunDir, base_dir: Path
) -> Worker:
    """The trainer's process, or all of its ranks, stopped when `stack` closes."""
    place: dict[str, Any] = {
        "name": "trainer",
        "log_path": run_dir.logs / "trainer.log",
        "environment": {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
    }
    num_ranks = config.trainer.num_ranks
    trainer: Worker
    if num_ranks == 1:
        trainer = LocalWorker(TRAINER, **place)
    else:
        trainer = RankGroup(TRAINER, num_ranks=num_ranks, **place)
    stack.push_async_callback(trainer.stop)
    await trainer.start(
        config=config.trainer.model_dump(mode="json"),
        model_path=str(policy.folder),
        seed=config.run.seed,
        num_total_steps=config.run.num_steps,
        context_length=policy.context_length,
        base_dir=str(base_dir),
        opd=config.opd.model_dump(mode="json"),
    )
    return trainer
