"""Checks of this machine: memory, disk, ports, the run folder."""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from rollmill.checks.finding import Finding, error, ok, warning
from rollmill.config import Config
from rollmill.config.load import load_config, to_plain
from rollmill.loop.policy import Policy
from rollmill.loop.run_dir import RunDir

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINER_BYTES_PER_PARAMETER = 16
"""float32 weights, gradients and two AdamW moments."""
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
        "trainer": parameters * TRAINER_BYTES_PER_PARAMETER + PROCESS_BYTES,
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
    text = (
        f"{config.run.keep_checkpoints + 1} checkpoints of {size / GIB:.1f} GiB need "
        f"{needed / GIB:.1f} GiB; free: {free / GIB:.1f} GiB"
    )
    if needed > free:
        yield error("disk", text, "free some, set run.keep_checkpoints to 1, or move run.dir")
    else:
        yield ok("disk", text)


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
