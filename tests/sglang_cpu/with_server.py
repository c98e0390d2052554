"""Run a command beside a real SGLang server on the CPU.

    python tests/sglang_cpu/with_server.py SGLANG_PYTHON [--model FOLDER] -- COMMAND...

Starts the server on a free port, with a tiny random model unless a folder is given; runs COMMAND
with ROLLMILL_CONFORMANCE_URL, ROLLMILL_CONFORMANCE_MODEL and ROLLMILL_SGLANG_PID set; ends the
server in any case, also when this process is killed; and returns COMMAND's exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from random_model import write_random_model

from rollmill.config.engine import EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineError
from rollmill.engine.http import new_session
from rollmill.engine.process import ChildProcess, free_port

START_TIMEOUT_S = 300
MAX_TOTAL_TOKENS = 32768
STAND_IN = Path(__file__).parent / "stand_in"


def server_command(python: str, model: str, dtype: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "rollmill.engine.leash"),
        *("env", f"PYTHONPATH={STAND_IN}", "SGLANG_USE_CPU_ENGINE=1"),
        *("HF_HUB_OFFLINE=1", f"OMP_NUM_THREADS={os.environ.get('SGLANG_THREADS', '1')}"),
        *(python, "-m", "sglang.launch_server", "--model-path", model, "--device", "cpu"),
        *("--attention-backend", "torch_native", "--dtype", dtype, "--weight-version", "0"),
        *("--max-total-tokens", str(MAX_TOTAL_TOKENS), "--skip-server-warmup"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
    ]


async def until_ready(url: str, server: ChildProcess) -> None:
    """Wait for the first good answer; the server's last words if it ends before."""

    async def ask() -> None:
        async with new_session() as session:
            client = EngineClient(url, EngineConfig(max_retries=0), session)
            while True:
                try:
                    return await client.health(timeout_s=60)
                except EngineError:
                    await asyncio.sleep(0.5)

    asking, ending = asyncio.create_task(ask()), asyncio.create_task(server.wait_exit())
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise SystemExit(f"SGLang ended before it was ready: {ending.result()}")
        asking.result()
    except TimeoutError:
        raise SystemExit(f"SGLang was not ready within {START_TIMEOUT_S} s") from None
    finally:
        asking.cancel()
        ending.cancel()
        await asyncio.gather(asking, ending, return_exceptions=True)


async def run(options: argparse.Namespace, scratch: Path) -> int:
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    model = options.model or write_random_model(scratch / "model", 0)
    server = ChildProcess("SGLang", Path(options.log) if options.log else scratch / "sglang.log")
    await server.spawn(server_command(options.python, model, options.dtype, port))
    try:
        await until_ready(url, server)
        environment = os.environ | {
            "ROLLMILL_CONFORMANCE_URL": url,
            "ROLLMILL_CONFORMANCE_MODEL": model,
            "ROLLMILL_SGLANG_PID": str(server.pid),
        }
        command = await asyncio.create_subprocess_exec(*options.command, env=environment)
        try:
            return await command.wait()
        finally:
            if command.returncode is None:
                command.kill()
                await command.wait()
    finally:
        await server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="Python of the environment that has SGLang")
    parser.add_argument("--model", help="model folder; default: a tiny random model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--log", help="file for the server's output; default: none is kept")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(run(options, Path(scratch)))


if __name__ == "__main__":
    sys.exit(main())
