"""One GRPO optimizer step on a real model: rollmill's trainer beside a plain loop and beside TRL.

    python bench/trainer.py MODEL_FOLDER [--sequences 64] [--threads 1] [--dtype float32]
        [--variants auto padded tree packed blocks plain trl] [--peers .venv-peers/bin/python]

Prints a Markdown table. One variant alone, such as TRL, which needs some 9 GB for 64 sequences:
`--variants trl`.

The batch: groups of 8 answers to one prompt of 44 tokens, total lengths log-normal with mean 160,
random tokens (so answers share nothing but their prompt: the worst case for prefix trees). Every
variant takes the same step in a process of its own, so that its peak memory is its own:

- `auto`, `padded`, `tree`, `packed`: rollmill in that layout (`auto` names its choice);
- `blocks`: `packed` in rows of 512 under a block mask, as for models that cannot do without;
- `plain`: what one writes first: rows in the order given, 8 at a time, padded to the longest, full
  logits, `log_softmax`;
- `trl`: TRL's GRPOTrainer, 8 rows at a time, run by the Python of `--peers` (`make peers`).

Columns: tokens per second of the whole step (forward, backward, optimizer), by the time of the
process (`cpu`) and of the clock (`wall`), of which on a busy machine compare the former; the share
of GEMM peak, by 6 × parameters × tokens over what large products reach in the same process; seconds
of process time of the step, and of a forward pass without gradient beside it; padding among the
positions; peak memory. The measured step comes after a small one that warms caches up.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollmill.config.trainer import OptimizerConfig, TrainerConfig
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.trainer.advantages import grpo
from rollmill.trainer.algorithm import find_algorithm
from rollmill.trainer.layout import MicroBatch, TokenSequence
from rollmill.trainer.learner import Learner
from rollmill.trainer.policy import Policy
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.scoring import score_sequences
from rollmill.trainer.weight_files import DTYPES

PROMPT_LENGTH = 44
GROUP_SIZE = 8
LEARNING_RATE = 1e-9
HEADER = """
| | tokens/s cpu | wall | GEMM peak | step s | forward s | padding | memory | grad norm |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
LAYOUTS = ("auto", "padded", "tree", "packed", "blocks")


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


def num_tokens(groups: list[Group]) -> int:
    return sum(len(sample.tokens) for group in groups for sample in group.samples)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


Step = Callable[[list[Group]], dict[str, Any]]
"""Takes one optimizer step: gradient norm, padding share, and what else is known of it."""


def make_policy(arguments: argparse.Namespace) -> Policy:
    policy = Policy(
        load(arguments.model),
        device=torch.device("cpu"),
        compute_dtype=DTYPES[arguments.dtype],
        layout="packed" if arguments.only == "blocks" else arguments.only,
    )
    policy.needs_mask |= arguments.only == "blocks"
    return policy


def rollmill_step(arguments: argparse.Namespace, policy: Policy) -> Step:
    config = TrainerConfig(
        max_tokens_per_micro_batch=arguments.budget, optimizer=OptimizerConfig(lr=LEARNING_RATE)
    )
    learner = Learner(policy, config, find_algorithm(config.algorithm), num_total_steps=9)

    def step(groups: list[Group]) -> dict[str, Any]:
        metrics = learner.learn(
            groups, step=0, reward_key=None, max_new_tokens=512, temperature=1.0
        )
        return {
            "grad_norm": metrics["optimizer/grad_norm"],
            "padding": metrics["tokens/padding_share"],
        }

    return step


def forward_pass(policy: Policy, groups: list[Group], budget: int) -> dict[str, Any]:
    """Process time of scoring all answers without gradient, and the layout chosen for them."""
    sequences = [
        TokenSequence(
            sample.tokens, np.arange(PROMPT_LENGTH, len(sample.tokens)), sample.group_index
        )
        for group in groups
        for sample in group.samples
    ]
    start = time.process_time()
    score_sequences(policy, sequences, budget=budget, temperature=1.0, ranks=Ranks())
    spent = time.process_time() - start
    return {"forward": spent, "layout": layout_of(policy.plan(sequences, budget)[0])}


def layout_of(batch: MicroBatch) -> str:
    if batch.boundaries is not None:
        return "packed"
    mask = batch.mask
    return "padded" if mask is None or mask.ndim == 2 else "tree or blocks"


def plain_step(arguments: argparse.Namespace) -> Step:
    model = load(arguments.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(groups: list[Group]) -> dict[str, Any]:
        samples = [sample for group in groups for sample in group.samples]
        rewards = np.array([sample.scalar_reward() for sample in samples])
        advantages = grpo(rewards, np.array([sample.group_index for sample in samples]))
        padded = 0
        for start in range(0, len(samples), GROUP_SIZE):
            rows = samples[start : start + GROUP_SIZE]
            share = torch.from_numpy(advantages[start : start + GROUP_SIZE]).float()
            with torch.autocast(
                "cpu", DTYPES[arguments.dtype], enabled=arguments.dtype != "float32"
            ):
                padded += plain_backward(model, rows, share, len(samples))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": float(norm), "padding": 1 - num_tokens(groups) / padded}

    return step


def plain_backward(
    model: Any, rows: list[Sample], advantages: torch.Tensor, num_samples: int
) -> int:
    """One micro-batch of the plain loop; the positions it computed."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        length = len(row.tokens)
        tokens[i, :length] = torch.from_numpy(row.tokens.astype(np.int64))
        attention[i, :length] = 1
        mask[i, PROMPT_LENGTH:length] = 1
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
    scores = logits[:, :-1].float().log_softmax(-1)
    log_probs = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    ratios = (log_probs - log_probs.detach()).exp()
    scaled = advantages[:, None]
    per_token = -torch.minimum(ratios * scaled, ratios.clamp(0.8, 1.28) * scaled)
    means = (per_token * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)
    (means.sum() / num_samples).backward()
    return tokens.numel()


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


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What one variant does, in this process."""
    torch.set_num_threads(arguments.threads)
    groups = make_groups(arguments.sequences, arguments.mean_length)
    peak = gemm_peak(DTYPES[arguments.dtype])
    policy = None
    if arguments.only == "trl":
        from trl_step import take_step

        spent = take_step(arguments.model, groups, lr=LEARNING_RATE, dtype=arguments.dtype)
    else:
        policy = make_policy(arguments) if arguments.only in LAYOUTS else None
        step = plain_step(arguments) if policy is None else rollmill_step(arguments, policy)
        step(groups[:1])
        wall, cpu = time.perf_counter(), time.process_time()
        spent = step(groups)
        spent["wall"] = time.perf_counter() - wall
        spent["cpu"] = time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if policy is not None:
        spent |= forward_pass(policy, groups, arguments.budget)
    return {**spent, "gemm_peak": peak, "memory": memory}


def run_variant(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of a variant, measured in a process of its own; None when it cannot run."""
    python = arguments.peers if name == "trl" else sys.executable
    if name == "trl" and not Path(python).exists():
        print(f"trl: left out, there is no {python} (make peers)")
        return None
    done = subprocess.run(
        [python, __file__, *sys.argv[1:], "--only", name],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{name}: failed with exit code {done.returncode}")
        return None
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean-length", type=float, default=160)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--variants", nargs="+", default=["auto", *LAYOUTS[1:], "plain", "trl"])
    parser.add_argument("--peers", default=".venv-peers/bin/python")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments)))
        return
    tokens = num_tokens(make_groups(arguments.sequences, arguments.mean_length))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(arguments.model))
    flops = 6 * sum(parameter.numel() for parameter in model.parameters()) * tokens
    print(f"{arguments.sequences} sequences, {tokens} tokens, {arguments.dtype}")
    print(HEADER)
    times = {}
    for name in arguments.variants:
        figures = run_variant(name, arguments)
        if figures is not None:
            times[name] = figures["cpu"]
            print(table_row(name, figures, tokens, flops), flush=True)
    for name in times.keys() - {"auto"} if "auto" in times else ():
        print(f"auto is {times[name] / times['auto']:.2f}× as fast as {name} (process time)")


def table_row(name: str, figures: dict[str, Any], tokens: int, flops: float) -> str:
    cpu, peak = figures["cpu"], figures["gemm_peak"]
    cells = [
        f"{name} ({figures['layout']})" if name == "auto" else name,
        f"{tokens / cpu:.0f}",
        f"{tokens / figures['wall']:.0f}",
        f"{flops / cpu / peak:.0%} of {peak / 1e9:.0f} GFLOP/s",
        f"{cpu:.1f}",
        f"{figures['forward']:.1f}" if "forward" in figures else "",
        f"{figures['padding']:.1%}",
        f"{figures['memory']:.1f} GB",
        f"{figures['grad_norm']:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def load_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


if __name__ == "__main__":
    main()
