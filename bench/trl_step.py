"""One optimizer step of TRL's GRPOTrainer on given samples, for `bench/trainer.py`.

Everything is TRL's own but the answers, which its `rollout_func` hands it, and the rewards. Needs
an environment with TRL (`make peers`).
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollmill.sample import Group


class Clock(TrainerCallback):
    """Seconds of the clock and of the process from the first micro-batch to the optimizer step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._start = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.spent["wall"] = time.perf_counter() - self._start[0]
        self.spent["cpu"] = time.process_time() - self._start[1]


def take_step(
    folder: Path, groups: list[Group], *, lr: float, dtype: str, rows: int = 8
) -> dict[str, float]:
    """Gradient norm, padding share and seconds of one step on `groups`, `rows` rows at a time."""
    longest = max(s.response_length for group in groups for s in group.samples)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        attempts: Counter[str] = Counter()
        answers: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "given": []}
        for prompt in prompts:
            sample = groups[int(prompt)].samples[attempts[prompt]]
            attempts[prompt] += 1
            answers["prompt_ids"].append(sample.prompt_tokens.tolist())
            answers["completion_ids"].append(sample.response_tokens.tolist())
            answers["given"].append(sample.scalar_reward())
        return {**answers, "logprobs": [[-1.0] * len(a) for a in answers["completion_ids"]]}

    def reward(completions: list[str], given: list[float], **rest: Any) -> list[float]:
        return given

    num_samples = sum(len(group.samples) for group in groups)
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            loss_type="grpo",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            num_generations=len(groups[0].samples),
            max_completion_length=longest,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=num_samples // rows,
            gradient_checkpointing=False,
            learning_rate=lr,
            max_steps=1,
            bf16=dtype == "bfloat16",
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            args=settings,
            reward_funcs=[reward],
            rollout_func=rollout,
            train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(len(groups))]}),
            callbacks=[clock],
        )
        trainer.train()
    norm = next(log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log)
    width = max(len(sample.prompt_tokens) for group in groups for sample in group.samples) + longest
    tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
    padding = 1 - tokens / (num_samples * width)
    return {**clock.spent, "grad_norm": float(norm), "padding": padding}
