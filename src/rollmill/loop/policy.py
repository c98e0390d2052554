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
from rollmill.errors import ConfigError
from rollmill.loop.run_dir import RunDir
from rollmill.models import context_length_of, resolve_model
from rollmill.rollout.evaluate import Evaluator
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
        )
    return Policy(folder, tokenizer, length)


def open_pool(config: Config, policy: Policy, run_dir: RunDir) -> EnginePool:
    """The engines, not started yet."""
    return EnginePool(
        config.engine,
        model_path=str(policy.folder),
        tokenizer_path=config.model.tokenizer,
        context_length=policy.context_length,
        run_dir=run_dir.root,
    )


def open_evaluator(
    config: Config, policy: Policy, pool: EnginePool, hooks: LoadedHooks, base_dir: Path
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
    )
    return trainer
