"""Evaluation on engines of its own: one version, while training goes on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_script import Script
from scripted_engine import ScriptedEngine

from rollmill.config import Config
from rollmill.config.load import parse_config
from rollmill.engine.pool import EnginePool
from rollmill.errors import ConfigError, StallError
from rollmill.loop.activities import Activities
from rollmill.loop.doctor import StallDoctor
from rollmill.loop.evaluations import EnginesApart, Evaluations
from rollmill.loop.records import Records, open_timeline
from rollmill.loop.watched import WatchedEngines
from rollmill.rollout.evaluate import Evaluator
from rollmill.rollout.hooks import LoadedHooks
from rollmill.telemetry.console import RunView
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.samples import read_samples
from rollmill.telemetry.trackers import Trackers
from rollmill.testing import FakeTokenizer
from rollmill.weights import open_transport
from rollmill.weights.base import Transport
from support.tiny_run import metrics_of, rollmill, write_tiny_run

STEPS = 4


def test_an_evaluation_holds_its_version_while_training_goes_on(tmp_path: Path) -> None:
    config = write_tiny_run(
        tmp_path,
        run__num_steps=STEPS,
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=4,
        rollout__asynchronous=True,
        engine__num_engines=2,
        eval__num_engines=1,
        eval__every=2,
    )
    run = tmp_path / "run"

    finished = rollmill("train", config)

    assert finished.returncode == 0, finished.stderr
    evaluated = metrics_of(run, "eval")
    assert [record["step"] for record in evaluated] == [0, 2, 4]
    assert all("eval/sorted/pass@1" in record for record in evaluated)
    for step in (0, 2, 4):
        answers = read_samples(run / "eval" / "sorted" / f"step_{step:06d}.parquet")
        assert {int(v) for s in answers for v in s.weight_versions} == {step}
    assert (run / "logs" / "engine_1.log").exists()

    again = rollmill("train", config)
    assert again.returncode == 0, again.stderr
    assert metrics_of(run, "eval") == evaluated, "what was evaluated is not evaluated again"


class Trainer:
    """Stands in for the trainer's process."""

    pid = None

    async def start(self, **_: Any) -> None:
        """It runs."""

    async def stop(self, grace_s: float = 5.0) -> None:
        """It has no process."""

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        assert method == "write_weights"
        Path(arguments["path"], "model.safetensors").write_bytes(b"made up")
        return {"num_bytes": 7}


def test_an_evaluation_beside_training_that_stalls_is_diagnosed_by_itself(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "t20 t21", "label": "x"}\n')

    async def main() -> None:
        async with asyncio.timeout(30), ScriptedEngine(Script()) as server:
            config = parse_config(
                {
                    "run": {"dir": str(tmp_path / "run")},
                    "model": {"path": "model"},
                    "data": {"path": "unused.jsonl"},
                    "reward": {"type": "random"},
                    "engine": {"urls": [server.url]},
                    "weights": {"dir": str(tmp_path / "weights"), "verify_checksum": False},
                    "eval": {
                        "datasets": [
                            {
                                "name": "one",
                                "data": {"path": "eval.jsonl", "apply_chat_template": False},
                            }
                        ]
                    },
                }
            )
            async with EnginePool(config.engine, model_path="none", run_dir=tmp_path) as pool:
                transport = open_transport(config, tmp_path)
                evaluations, evaluator = open_apart(config, pool, transport, tmp_path)
                async with evaluator:
                    server.hold()
                    await evaluations.run(1, Trainer())
                    assert server.version == "1"
                    with pytest.raises(StallError) as raised:
                        await evaluations.finish()
                assert f"at {server.url}" in (raised.value.found or "")
                await transport.close()

    asyncio.run(main())


def open_apart(
    config: Config, pool: EnginePool, transport: Transport, folder: Path
) -> tuple[Evaluations, Evaluator]:
    """Evaluations on engines of their own, watched as in a run."""
    activities = Activities()
    evaluator = Evaluator(
        config,
        engines=WatchedEngines(pool, activities),
        tokenizer=FakeTokenizer(),
        context_length=64,
        hooks=LoadedHooks(),
        base_dir=folder,
    )
    evaluations = Evaluations(
        config,
        evaluator=evaluator,
        records=Records(
            MetricsLog(folder / "metrics.jsonl"),
            Trackers(),
            open_timeline(config.telemetry, folder),
            Dumps(config.telemetry, folder),
        ),
        view=RunView(is_on=False, num_steps=1),
        doctor=StallDoctor(
            timeout_s=0.2,
            policy="stop",
            abort_timeout_s=1.0,
            activities=activities,
            engines=pool,
        ),
        apart=EnginesApart(pool, transport),
    )
    return evaluations, evaluator


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"num_engines": 2}, "expected fewer than the 2 of engine"),
        ({"urls": ["http://a", "http://b"]}, "expected fewer than the 2 of engine"),
        ({"num_engines": 3, "offload": True}, "does not go together with engine.offload"),
    ],
)
def test_engines_must_be_left_for_training(engine: dict[str, object], message: str) -> None:
    values = {
        "model": {"path": "model"},
        "data": {"path": "train.jsonl"},
        "engine": engine,
        "eval": {"num_engines": 2},
    }
    with pytest.raises(ConfigError, match=message):
        parse_config(values)
