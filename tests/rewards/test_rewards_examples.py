"""The examples of rewards: each configuration of their README, run as it stands there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmill.config.reward import RewardConfig
from rollmill.rewards.grade_file import grade_jsonl
from rollmill.rewards.judge import Judge
from rollmill.rewards.outcome import Outcome
from rollmill.sample import Sample

EXAMPLES = Path(__file__).parents[2] / "examples" / "rewards"


def section(word: str) -> dict[str, Any]:
    """The reward section of the README that has `word` in it."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (block,) = (block for block in blocks if word in block)
    values: dict[str, Any] = yaml.safe_load(block)["reward"]
    return values


def judged(values: dict[str, Any], samples: list[Sample]) -> list[Outcome]:
    async def main() -> list[Outcome]:
        async with Judge(RewardConfig(**values), seed=0, base_dir=EXAMPLES) as judge:
            return await judge.judge_group(samples)

    return asyncio.run(main())


def answer(response: str, label: Any = None, **metadata: Any) -> Sample:
    return Sample([1], response=response, label=label, metadata=metadata)


def test_the_nearer_estimate_gets_more() -> None:
    responses = ["100", "about 90", "1000", "no idea"]

    outcomes = judged(section("closeness"), [answer(text, 100) for text in responses])

    assert [outcome.reward for outcome in outcomes] == [1.0, 0.9, 0.0, None]
    assert outcomes[3].kind == "invalid"


def test_recorded_answers_can_be_graded(tmp_path: Path) -> None:
    config = RewardConfig(function="closeness.py:closeness")

    summary = grade_jsonl(
        EXAMPLES / "answers.jsonl", tmp_path / "out.jsonl", config, base_dir=EXAMPLES
    )

    assert summary.outcomes == {"value": 2, "invalid": 1}
    assert summary.reward_sum == pytest.approx(0.9 + 0.75)


def test_equal_answers_share_a_point() -> None:
    samples = [answer(text, ["2", "3", "5", "7"]) for text in ("2", "2", "7", "9")]

    assert [o.reward for o in judged(section("distinct"), samples)] == [0.5, 0.5, 1.0, 0.0]


def test_a_weighted_sum_has_its_parts_beside_it() -> None:
    samples = [
        answer(r"Two and two and one make \boxed{5}", 5, max_words=10),
        answer(r"\boxed{6}", 5, max_words=10),
    ]

    right, wrong = (outcome.reward for outcome in judged(section("weights"), samples))

    parts = {"math": 1.0, "style.py:shows_work": 1.0, "style.py:brevity": 0.3}
    assert right == pytest.approx({**parts, "total": 1.0 + 0.2 + 0.03})
    parts = {"math": 0.0, "style.py:shows_work": 0.0, "style.py:brevity": 0.9}
    assert wrong == pytest.approx({**parts, "total": 0.09})


@pytest.fixture
def server() -> Iterator[str]:
    command = [sys.executable, str(EXAMPLES / "server.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.kill()


@pytest.mark.parametrize("batch_size", [1, 16])
def test_the_server_judges(server: str, batch_size: int) -> None:
    values = section("remote")
    values["params"] |= {"url": server, "batch_size": batch_size}
    words = ["oxygen", "light"]
    samples = [
        answer("Plants need light and give oxygen.", must_mention=words),
        answer("They give Oxygen.", must_mention=words),
        answer("No idea.", must_mention=words),
        answer("", must_mention=words),
    ] * 20

    outcomes = judged(values, samples)

    assert [outcome.reward for outcome in outcomes] == [1.0, 0.5, 0.0, None] * 20
    assert outcomes[3].kind == "invalid"


def test_what_the_server_cannot_read_is_an_error_at_once(server: str) -> None:
    values = section("remote")
    values["params"] = {"url": server}
    sample = answer("x")
    sample.metadata["must_mention"] = 7

    (outcome,) = judged(values, [sample])

    assert outcome.kind == "error"
    assert "400" in str(outcome.detail)
