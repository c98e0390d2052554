"""Generation throughput, side by side in one run: embedded engine and transformers.

    python bench/engine.py MODEL_FOLDER [--threads 2] [--repeats 1] [--only uniform,mixed,...]
        [--engines embedded,generate,continuous-batching]

Beside a real SGLang (installed by `make test-sglang`):

    python tests/sglang_cpu/with_server.py SGLANG_PYTHON --model MODEL_FOLDER --dtype bfloat16 -- \
        python bench/engine.py MODEL_FOLDER --dtype bfloat16 --engines embedded,sglang

The embedded engine and SGLang run as their own processes and are called over HTTP with log-probs
on; transformers' `generate` gets one left-padded static batch, without log-probs. All write the
same number of tokens per request (end tokens are ignored) at temperature 1; prompts are random
token ids. Each repeat runs the engines one after the other on the same load, so compare ratios
within a repeat: the figures themselves move with whatever else the machine does. On a busy machine
the ratio of CPU times is the steadier one (the client is not in it; the HTTP servers are).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")


@dataclass(frozen=True)
class Load:
    """Requests sent at once: prompts and how many tokens each one gets."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def total(self) -> int:
        return sum(self.new_tokens)


def make_loads(model: str, low: int, high: int) -> dict[str, Load]:
    """The standard loads; token ids are drawn from `[low, high)`."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(low, high) for _ in range(length)]

    sizes = (1, 16, 64) if model == "real" else (1, 64, 256)
    loads = [Load(f"uniform {n}", [prompt(64) for _ in range(n)], [64] * n) for n in sizes]
    loads.append(
        Load(
            "mixed 64",
            [prompt(rng.randint(16, 128)) for _ in range(64)],
            [rng.randint(8, 120) for _ in range(64)],
        )
    )
    shared = [prompt(256) for _ in range(8)]
    loads.append(Load("shared 8x8", [list(shared[i // 8]) for i in range(64)], [64] * 64))
    return {load.name: load for load in loads}


class Served:
    """An engine reached over HTTP: SGLang's native API."""

    url: str

    def run(self, load: Load) -> float:
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> float:
        import aiohttp

        timeout, connector = aiohttp.ClientTimeout(total=3600), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            async with session.post(f"{self.url}/flush_cache") as response:
                assert response.status == 200

            async def one(prompt: list[int], new_tokens: int) -> int:
                params = {"max_new_tokens": new_tokens, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
                async with session.post(f"{self.url}/generate", json=body) as response:
                    return len((await response.json())["output_ids"])

            started = time.perf_counter()
            pairs = zip(load.prompts, load.new_tokens, strict=True)
            written = await asyncio.gather(*(one(*pair) for pair in pairs))
            elapsed = time.perf_counter() - started
        assert sum(written) == load.total
        return elapsed


class Embedded(Served):
    """The embedded engine in a process of its own."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        self.name = f"embedded {dtype}"
        config = {"dtype": dtype, "num_threads": threads, "max_running_requests": 256}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rollmill.engine.embedded", folder, "--port", "0"),
                *("--exit-with-stdin", "--config-json", json.dumps(config)),
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self.url = ""
        for line in self._process.stderr:
            if found := re.search(r"ready on (\S+)", line):
                self.url = found[1]
                break
        if not self.url:
            raise SystemExit("the embedded engine did not start")

    def cpu_s(self) -> float:
        return cpu_seconds(f"/proc/{self._process.pid}/stat")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class SGLang(Served):
    """The server that tests/sglang_cpu/with_server.py started; frozen while others have their turn,
    because its scheduler takes a whole core when idle."""

    name = "SGLang"

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        self.url = os.environ["ROLLMILL_CONFORMANCE_URL"]
        self._pid = int(os.environ["ROLLMILL_SGLANG_PID"])
        os.killpg(self._pid, signal.SIGSTOP)

    def run(self, load: Load) -> float:
        os.killpg(self._pid, signal.SIGCONT)
        try:
            return super().run(load)
        finally:
            os.killpg(self._pid, signal.SIGSTOP)

    def cpu_s(self) -> float:
        """CPU time of all processes of the server."""
        total = 0.0
        for path in glob.glob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended
                if os.getpgid(int(path.split("/")[2])) == self._pid:
                    total += cpu_seconds(path)
        return total

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGCONT)


def cpu_seconds(stat_path: str) -> float:
    """CPU time of one process so far (Linux)."""
    with open(stat_path) as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Generate:
    """transformers' `generate` on one static batch."""

    name = "generate"

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def run(self, load: Load) -> float:
        from transformers import StoppingCriteria, StoppingCriteriaList

        torch = self._torch
        longest = max(map(len, load.prompts))
        ids = torch.zeros(len(load.prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(load.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        limits = torch.tensor(load.new_tokens)

        class Enough(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                return input_ids.shape[1] - longest >= limits

        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=-1,
                pad_token_id=0,
                max_new_tokens=max(load.new_tokens),
                stopping_criteria=StoppingCriteriaList([Enough()]),
            )
        return time.perf_counter() - started

    def cpu_s(self) -> float:
        """CPU time of this process so far."""
        return time.process_time()

    def close(self) -> None:
        del self.model


class ContinuousBatching(Generate):
    """transformers' own continuous batching."""

    name = "continuous batching"

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(folder, dtype, threads)
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            eos_token_id=-1,
            pad_token_id=0,
            max_new_tokens=1024,
        )
        # Its own choice on a CPU is nearly all memory of the machine; this holds every load.
        room = ContinuousBatchingConfig(num_blocks=256, page_size=256, max_batch_tokens=1024)
        self.manager = self.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=room
        )
        self.manager.start()
        self.run(Load("the first request sets it up", [[20, 21]], [2]))

    def run(self, load: Load) -> float:
        started = time.perf_counter()
        for prompt, new_tokens in zip(load.prompts, load.new_tokens, strict=True):
            self.manager.add_request(prompt, max_new_tokens=new_tokens)
        written = 0
        for _ in load.prompts:
            while (output := self.manager.get_result(timeout=1)) is None:
                assert self.manager.is_running()
            written += len(output.generated_tokens)
        elapsed = time.perf_counter() - started
        assert written == load.total, (written, load.total)
        return elapsed

    def close(self) -> None:
        self.manager.stop(block=True)
        super().close()


def tiny_model(folder: str) -> str:
    """A random Llama of about 2M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


ENGINES: dict[str, Callable[[str, str, int], Any]] = {
    "embedded": Embedded,
    "embedded-float32": lambda folder, dtype, threads: Embedded(folder, "float32", threads),
    "generate": Generate,
    "continuous-batching": ContinuousBatching,
    "sglang": SGLang,
}


def measure(engines: list[Any], loads: list[Load], repeats: int) -> None:
    """Print a table row per load: tokens per second, and ratios by wall and by CPU time."""
    print("| load | tokens | " + " | ".join(f"{e.name} tok/s" for e in engines) + " | ratios |")
    print("| --- | --- | " + " | ".join("---" for _ in engines) + " | --- |")
    for load in loads:
        walls: dict[str, list[float]] = {e.name: [] for e in engines}
        cpus: dict[str, list[float]] = {e.name: [] for e in engines}
        for _ in range(repeats):
            for engine in engines:
                before = engine.cpu_s()
                walls[engine.name].append(engine.run(load))
                cpus[engine.name].append(engine.cpu_s() - before)
        first = engines[0].name
        ratios = [
            f"{_ratio(walls[e.name], walls[first]):.2f}x {e.name} "
            f"(CPU time {_ratio(cpus[e.name], cpus[first]):.2f}x)"
            for e in engines[1:]
        ]
        rates = [load.total / statistics.median(walls[e.name]) for e in engines]
        figures = " | ".join(f"{rate:.0f}" for rate in rates)
        print(f"| {load.name} | {load.total} | {figures} | {', '.join(ratios)} |", flush=True)


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="model folder, or 'tiny' for a random model of 2M parameters")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default="", help="comma-separated beginnings of load names")
    parser.add_argument(
        "--engines", default="embedded,generate", help=f"which ones: {', '.join(ENGINES)}"
    )
    options = parser.parse_args()
    kinds = [ENGINES[name] for name in options.engines.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        is_tiny = options.model == "tiny"
        folder = tiny_model(scratch) if is_tiny else options.model
        wanted = tuple(name for name in options.only.split(",") if name) or ("",)
        loads = make_loads("tiny" if is_tiny else "real", 20, 500)
        chosen = [load for name, load in loads.items() if name.startswith(wanted)]
        engines = [kind(folder, options.dtype, options.threads) for kind in kinds]
        try:
            measure(engines, chosen, options.repeats)
        finally:
            for engine in engines:
                engine.close()


if __name__ == "__main__":
    main()
