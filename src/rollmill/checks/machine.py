"""Checks of this machine: memory, disk, ports, the run folder."""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmill.checks.finding import Finding, error, ok, warning
from rollmill.config import Config
from rollmill.config.load import load_config, to_plain
from rollmill.loop.policy import Policy
from rollmill.loop.run_dir import RunDir

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINER_BYTES_PER_PARAMETER = 16
"""float32 weights, gradients and two AdamW moments."""
WEIGHT_BYTES = 4
"""A float32 weight that is not trained: of a reference model, or under LoRA adapters."""
ADAPTED_WIDTHS = 23
"""Inputs and outputs of a layer's linear parts in hidden sizes, for LoRA: four of attention, three
of a feed-forward part four times as wide."""
BYTES_PER_DUMPED_TOKEN = 16
"""Ids, log-probs of engine and trainer, and text, before compression."""
CHECKPOINT_BYTES_PER_PARAMETER = 12
PROCESS_BYTES = 500 << 20
"""What a process with torch loaded takes by itself."""
GIB = 1 << 30


def num_parameters(folder: Path) -> int:
    """Parameters of a model folder, from the headers of its safetensors files."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                total += math.prod(tensors.get_slice(name).get_shape())
    return total


def memory_estimate(config: Config, policy: Policy) -> dict[str, int]:
    """Bytes of main memory by use, for a run on this machine's CPU.

    Activations are those of one micro-batch: about 34 bytes × hidden size per token and layer
    (Korthikanti et al. 2022, without recomputation), twice that for float32, and the logits of
    one chunk.
    """
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(policy.folder, local_files_only=True).get_text_config()
    parameters = num_parameters(policy.folder)
    trainer = config.trainer
    activations = 34 * model.hidden_size * model.num_hidden_layers * 2
    if trainer.activation_checkpointing:
        activations = 4 * model.hidden_size * model.num_hidden_layers
    uses = {
        "trainer": trained_bytes(config, policy, parameters, model) + PROCESS_BYTES,
        "activations": activations * trainer.max_tokens_per_micro_batch
        + 3 * 4 * model.vocab_size * trainer.logprob_chunk_tokens,
    }
    if not config.engine.urls and config.needs_engines:
        engine = config.engine.embedded
        heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
        head_dim = (
            getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        )
        kv_token = 2 * model.num_hidden_layers * heads * head_dim * BYTES_OF[engine.dtype]
        tokens = engine.max_total_tokens or engine.max_running_requests * policy.context_length
        weights = parameters * BYTES_OF[engine.dtype]
        uses["engine"] = config.engine.num_engines * (weights + PROCESS_BYTES)
        uses["KV cache"] = config.engine.num_engines * kv_token * tokens
        uses["weight sync"] = 2 * weights
    return uses


def trained_bytes(config: Config, policy: Policy, parameters: int, model: Any) -> int:
    """Bytes of the trained model with its optimizer, the reference model and the critic."""
    trainer, lora = config.trainer, config.trainer.lora
    if lora is None:
        size = parameters * TRAINER_BYTES_PER_PARAMETER
    else:
        adapters = lora.rank * ADAPTED_WIDTHS * model.hidden_size * model.num_hidden_layers
        size = parameters * WEIGHT_BYTES + adapters * TRAINER_BYTES_PER_PARAMETER
    if trainer.algorithm.kl_coef and (lora is None or trainer.reference_model is not None):
        reference = Path(trainer.reference_model or policy.folder)
        size += num_parameters(reference) * WEIGHT_BYTES
    if trainer.algorithm.advantage == "ppo":
        critic = Path(trainer.critic.model or policy.folder)
        size += num_parameters(critic) * TRAINER_BYTES_PER_PARAMETER
    return size


def check_memory(config: Config, policy: Policy) -> Iterator[Finding]:
    """The estimate against what is free."""
    uses = memory_estimate(config, policy)
    needed, free = sum(uses.values()), available_memory()
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in uses.items())
    text = f"about {needed / GIB:.1f} GiB ({parts}); free: {free / GIB:.1f} GiB"
    fix = (
        "make trainer.max_tokens_per_micro_batch or engine.embedded.max_total_tokens smaller, or "
        "set trainer.activation_checkpointing"
    )
    if needed > free:
        yield error("memory", text, fix)
    elif needed > 0.8 * free:
        yield warning("memory", text, fix)
    else:
        yield ok("memory", text)


def available_memory() -> int:
    """Bytes that a new process can take without swapping (Linux), else all physical memory."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_disk(config: Config, policy: Policy) -> Iterator[Finding]:
    """Room for the checkpoints that are kept, and one more while it is written."""
    size = num_parameters(policy.folder) * CHECKPOINT_BYTES_PER_PARAMETER
    needed = size * (config.run.keep_checkpoints + 1)
    folder = config.run.dir.resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    dumped = _dumped_bytes(config)
    text = (
        f"{config.run.keep_checkpoints + 1} checkpoints of {size / GIB:.1f} GiB need "
        f"{needed / GIB:.1f} GiB, samples at most {dumped / GIB:.1f} GiB; "
        f"free: {free / GIB:.1f} GiB"
    )
    if needed > free:
        yield error("disk", text, "free some, set run.keep_checkpoints to 1, or move run.dir")
    elif needed + dumped > free:
        yield warning("disk", text, "free some, move run.dir, or set telemetry.dump_samples: false")
    else:
        yield ok("disk", text)


def _dumped_bytes(config: Config) -> int:
    """Bytes of all samples of a run in which every answer is as long as it may be."""
    if not config.telemetry.dump_samples:
        return 0
    per_step = config.attempts_per_batch + config.telemetry.max_dropped_samples
    tokens = per_step * config.rollout.sampling.max_new_tokens * config.run.num_steps
    return tokens * BYTES_PER_DUMPED_TOKEN


def check_threads(config: Config) -> Iterator[Finding]:
    """Nothing computes with more threads than there are cores: they would wait for each other."""
    cores = len(os.sched_getaffinity(0))
    asked = {
        "engine.embedded.num_threads": (config.engine.embedded.num_threads or 0)
        * (0 if config.engine.urls else config.engine.num_engines),
        "trainer.num_threads": (config.trainer.num_threads or 0) * config.trainer.num_ranks,
    }
    for name, threads in asked.items():
        if threads > cores:
            yield warning(
                name,
                f"{threads} threads on {cores} cores: they wait for each other and all get slower",
                "set it so that threads times processes fit the cores, or to null",
            )


def check_run_dir(config: Config) -> Iterator[Finding]:
    """What is in the run folder already."""
    run_dir = RunDir(config.run.dir)
    steps = sorted(run_dir.checkpoints.glob("step_*")) if run_dir.checkpoints.is_dir() else []
    if not steps:
        yield ok("run folder", f"{config.run.dir}: a new run")
        return
    yield ok("run folder", f"{config.run.dir}: goes on from {steps[-1].name}")
    if run_dir.config.is_file():
        before, now = to_plain(load_config(run_dir.config)), to_plain(config)
        changed = sorted(_differences(before, now))
        if changed:
            yield warning(
                "run folder",
                f"it was started with other settings: {', '.join(changed[:6])}",
                "choose a new run.dir unless the change is meant",
            )


def _differences(a: object, b: object, path: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() | b.keys():
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif a != b:
        yield path


def check_ports(config: Config) -> Iterator[Finding]:
    """The engine ports asked for are free."""
    if config.engine.urls or config.engine.port is None:
        return
    for port in range(config.engine.port, config.engine.port + config.engine.num_engines):
        with socket.socket() as probe:
            try:
                probe.bind((config.engine.host, port))
            except OSError as problem:
                yield error(
                    "engine.port",
                    f"port {port} cannot be used: {problem.strerror}",
                    "set engine.port to null for free ports, or to another number",
                )
