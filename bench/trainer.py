"""One GRPO optimizer step on a real model: rollmill's trainer beside a plain padded loop.

    python bench/trainer.py MODEL_FOLDER [--sequences 64] [--threads 1] [--dtype float32]

The batch: groups of 8 answers to one prompt of 44 tokens, total lengths log-normal with mean 160,
random tokens (so answers share nothing but their prompt: the worst case for prefix trees). The
plain loop is what one writes first: rows in the order given, 8 at a time, padded to the longest,
full logits, `log_softmax`. Times are of the process (`cpu`) and of the clock (`wall`); on a busy
machine compare the former. GEMM peak is measured with one large float32 product.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollmill.config.trainer import AlgorithmConfig, OptimizerConfig, TrainerConfig
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.trainer.advantages import grpo
from rollmill.trainer.algorithm import find_algorithm
from rollmill.trainer.learner import Learner
from rollmill.trainer.policy import Policy
from rollmill.trainer.weight_files import DTYPES

PROMPT_LENGTH = 44
GROUP_SIZE = 8


def make_groups(num_sequences: int, mean_length: float, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    sigma = 0.5
    lengths = rng.lognormal(np.log(mean_length) - sigma**2 / 2, sigma, num_sequences)
    responses = np.maximum(lengths.astype(int) - PROMPT_LENGTH, 4)
    groups = []
    for index in range(num_sequences // GROUP_SIZE):
        prompt = rng.integers(1000, 40_000, PROMPT_LENGTH)
        samples = []
        for attempt in range(GROUP_SIZE):
            length = int(responses[index * GROUP_SIZE + attempt])
            segment = Segment.from_engine(rng.integers(1000, 40_000, length), -np.ones(length), 0)
            samples.append(
                Sample(
                    prompt_tokens=prompt,
                    group_index=index,
                    attempt=attempt,
                    segments=[segment],
                    status=Status.COMPLETED,
                    reward=float(rng.random()),
                )
            )
        groups.append(Group(index, samples))
    return groups


def plain_step(
    model: Any, optimizer: torch.optim.Optimizer, groups: list[Group]
) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([sample.scalar_reward() for sample in samples])
    advantages = grpo(rewards, np.array([sample.group_index for sample in samples]))
    padded = 0
    for start in range(0, len(samples), GROUP_SIZE):
        rows = samples[start : start + GROUP_SIZE]
        width = max(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width)
        attention = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            length = len(row.tokens)
            tokens[i, :length] = torch.from_numpy(row.tokens.astype(np.int64))
            attention[i, :length] = 1
            mask[i, PROMPT_LENGTH:length] = 1
        padded += tokens.numel()
        logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
        scores = logits[:, :-1].float().log_softmax(-1)
        log_probs = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        ratios = (log_probs - log_probs.detach()).exp()
        scaled = torch.from_numpy(advantages[start : start + GROUP_SIZE]).float()[:, None]
        per_token = -torch.minimum(ratios * scaled, ratios.clamp(0.8, 1.28) * scaled)
        means = (per_token * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)
        (means.sum() / len(samples)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    useful = sum(len(sample.tokens) for sample in samples)
    return {"optimizer/grad_norm": float(norm), "tokens/padding_share": 1 - useful / padded}


def gemm_peak(dtype: torch.dtype) -> float:
    """Multiply-adds × 2 per second of process time, on a product that fits the caches well."""
    first, second = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        for _ in range(10):
            first @ second
        best = max(best, 10 * 2 * 1024**3 / (time.process_time() - start))
    return best


def measure(
    name: str,
    action: Callable[[], dict[str, float]],
    groups: list[Group],
    peak: float,
    num_parameters: int,
) -> float:
    action()  # caches, allocator
    wall, cpu = time.perf_counter(), time.process_time()
    metrics = action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
    rate = 6 * num_parameters * tokens / cpu
    print(
        f"{name:<16} {tokens / wall:8.0f} tokens/s wall {tokens / cpu:8.0f} tokens/s cpu  "
        f"model FLOP/s ÷ GEMM peak {rate / peak:5.0%}  "
        f"padding {metrics.get('tokens/padding_share', 0):5.1%}  "
        f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB  "
        f"grad norm {metrics['optimizer/grad_norm']:.4f}",
        flush=True,
    )
    return cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean-length", type=float, default=160)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--budget", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    groups = make_groups(arguments.sequences, arguments.mean_length)
    peak = gemm_peak(DTYPES[arguments.dtype])
    print(f"GEMM peak {peak / 1e9:.0f} GFLOP/s per second of process time")
    times = {}
    for layout in ("tree", "padded"):
        config = TrainerConfig(
            layout=layout,
            max_tokens_per_micro_batch=arguments.budget,
            optimizer=OptimizerConfig(lr=1e-9),
            algorithm=AlgorithmConfig(),
        )
        model = load(arguments.model)
        policy = Policy(
            model,
            device=torch.device("cpu"),
            compute_dtype=DTYPES[arguments.dtype],
            chunk_tokens=config.logprob_chunk_tokens,
            layout=layout,
        )
        learner = Learner(policy, config, find_algorithm(config.algorithm), num_total_steps=9)

        def step(learner: Learner = learner) -> dict[str, float]:
            return learner.learn(
                groups, step=0, reward_key=None, max_new_tokens=512, temperature=1.0
            )

        times[layout] = measure(f"rollmill {layout}", step, groups, peak, policy.num_parameters)
        num_parameters = policy.num_parameters
        del model, policy, learner, step
    model = load(arguments.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)

    def plain() -> dict[str, float]:
        with torch.autocast("cpu", DTYPES[arguments.dtype], enabled=arguments.dtype != "float32"):
            return plain_step(model, optimizer, groups)

    times["plain"] = measure("plain loop", plain, groups, peak, num_parameters)
    for layout in ("tree", "padded"):
        print(f"plain / rollmill {layout}: {times['plain'] / times[layout]:.2f}×")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
