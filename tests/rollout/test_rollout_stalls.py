"""When nothing goes on: what is said about it, and what is done."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from engine_script import Fault, FaultKind, Script
from rollout_helpers import LengthJudge, Side, make_side, run, scripted, until
from scripted_engine import ScriptedEngine

from rollmill.errors import StallError
from rollmill.loop.activities import Activities, Kind
from rollmill.loop.doctor import StallDoctor
from rollmill.loop.watched import WatchedEngines, WatchedGrader, watched
from rollmill.rewards.outcome import Outcome
from rollmill.rollout.hooks import LoadedHooks
from rollmill.sample import Sample

Policy = Literal["warn", "retry", "stop"]


@asynccontextmanager
async def watched_side(
    folder: Path, policy: Policy, script: Script, *, judge: Any = None, **options: Any
) -> AsyncIterator[tuple[Side, StallDoctor, ScriptedEngine]]:
    """A rollout side over a real pool, watched as a run is."""
    async with scripted(script, folder) as (engine, pool):
        activities = Activities()
        side = make_side(
            folder,
            WatchedEngines(pool, activities),
            judge=WatchedGrader(judge or LengthJudge(), activities),
            **options,
        )
        parts = side.manager._parts
        side.manager._parts = replace(parts, runner=watched(parts.runner, activities))
        doctor = StallDoctor(
            timeout_s=0.2,
            policy=policy,
            abort_timeout_s=5.0,
            activities=activities,
            engines=pool,
        )
        yield side, doctor, engine


def test_a_warning_names_group_request_engine_and_age(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with watched_side(tmp_path, "warn", Script(length=6)) as (side, doctor, engine):
            engine.hold()
            collecting = asyncio.create_task(doctor.watch(side.collect()))
            await until(lambda: doctor.num_stalls > 0)
            engine.release()
            assert len((await collecting).groups) == 4
            assert f"at {engine.url}" in caplog.text
            assert f"engines: {engine.url} is ready" in caplog.text

    with caplog.at_level(logging.WARNING, logger="rollmill.loop.doctor"):
        run(main)
    assert "no request, judgement or answer has finished for" in caplog.text
    assert "group 0: engine request train/0/" in caplog.text


def test_a_stalled_request_is_ended_and_its_answer_goes_on_from_its_tokens(
    tmp_path: Path,
) -> None:
    script = Script(length=6, faults=(Fault(FaultKind.STALL, nth=(0,), after=3),))

    async def main() -> None:
        async with watched_side(tmp_path, "retry", script) as (side, doctor, engine):
            batch = await doctor.watch(side.collect())
            assert doctor.num_stalls >= 1
            assert len(batch.groups) == 4
            answers = [sample for group in batch.groups for sample in group.samples]
            stalled = [sample for sample in answers if len(sample.segments) == 2]
            assert len(stalled[0].segments[0]) == 3
            assert any(event.startswith("abort:train/") for event in engine.events)

    run(main)


def test_a_run_that_is_to_stop_ends_with_the_diagnosis(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched_side(tmp_path, "stop", Script(length=6)) as (side, doctor, engine):
            engine.hold()
            with pytest.raises(StallError) as raised:
                await doctor.watch(side.collect())
            assert engine.url in (raised.value.found or "")
            assert "group 0" in (raised.value.found or "")
        side.check_books()

    run(main)


class OneHangs(LengthJudge):
    """Never judges the first sample of group 0."""

    async def judge(self, sample: Sample) -> Outcome:
        if (sample.group_index, sample.attempt) == (0, 0):
            await asyncio.Event().wait()
        return await super().judge(sample)


def test_a_reward_that_hangs_costs_its_group_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        side_of = watched_side(tmp_path, "retry", Script(length=6), judge=OneHangs())
        async with side_of as (side, doctor, _):
            batch = await doctor.watch(side.train())
            assert [group.group_index for group in batch.groups] == [1, 2, 3, 4]
            assert "StallError" in batch.failed[0][1]
            side.check_books()

    run(main)
    assert "group 0: reward of sample 0 for" in caplog.text


def test_a_generate_function_that_hangs_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    async def generate(sample: Sample, context: Any) -> Sample:
        tries.append(sample.index)
        if sample.index == 0 and tries.count(0) == 1:
            await asyncio.Event().wait()
        return await context.extend(sample)  # type: ignore[no-any-return]

    async def main() -> None:
        hooks = LoadedHooks(generate=generate)
        side_of = watched_side(tmp_path, "retry", Script(length=6), hooks=hooks)
        async with side_of as (side, doctor, _):
            batch = await doctor.watch(side.collect())
            assert [group.group_index for group in batch.groups] == [0, 1, 2, 3]
            assert tries.count(0) == 2

    run(main)
    assert "group 0: generate function of sample 0 (attempt 0) for" in caplog.text


def test_a_step_of_the_trainer_that_takes_long_is_told_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with watched_side(tmp_path, "stop", Script()) as (_, doctor, _):
            ended = asyncio.Event()

            async def step() -> str:
                await ended.wait()
                return "learned"

            minding = asyncio.create_task(doctor.mind("the trainer's part of step 3", step()))
            await until(lambda: "the trainer's part of step 3 has been going on" in caplog.text)
            ended.set()
            assert await minding == "learned"

    with caplog.at_level(logging.WARNING, logger="rollmill.loop.doctor"):
        run(main)


def test_all_that_has_been_waited_for_long_is_named_and_what_has_just_begun_is_not() -> None:
    now = 0.0

    class NoEngines:
        def describe(self) -> str:
            return "all fine"

        def engine_of(self, rid: str) -> str | None:
            return None

        async def abort(self, rid: str, deadline_s: float) -> None:
            """Nothing runs."""

    async def main() -> None:
        nonlocal now
        activities = Activities(clock=lambda: now)
        doctor = StallDoctor(
            timeout_s=10.0,
            policy="warn",
            abort_timeout_s=1.0,
            activities=activities,
            engines=NoEngines(),
        )
        tasks = []
        for name, moment in (("first", 1.0), ("second", 1.2), ("late", 9.0)):
            now = moment
            work = activities.run(Kind.REWARD, name, asyncio.Event().wait, group=3)
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(0)
        now = 11.0
        diagnosis = doctor.diagnose(quiet_since=1.0)
        assert [activity.name for activity in diagnosis.blockers] == ["first", "second"]
        assert diagnosis.headline.endswith("for 10 s")
        assert list(diagnosis.lines) == [
            "group 3: reward first for 10 s",
            "group 3: reward second for 10 s",
            "engines: all fine",
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(main)


def test_what_waits_for_something_known_does_not_block_itself() -> None:
    async def main() -> None:
        activities = Activities()
        started = asyncio.Event()

        async def request() -> str:
            started.set()
            await asyncio.Event().wait()
            return "never"

        async def answer() -> str:
            return await activities.run(Kind.REQUEST, "r", request)

        task = asyncio.create_task(activities.run(Kind.ANSWER, "a", answer, group=7))
        await started.wait()
        (waiting,) = activities.waiting()
        assert (waiting.kind, waiting.group) == (Kind.REQUEST, 7)
        await waiting.interrupt("enough")
        with pytest.raises(StallError, match="enough"):
            await task
        assert activities.waiting() == []

    run(main)


def test_a_system_exit_reaches_the_caller_and_leaves_the_event_loop_alone() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def main() -> None:
        with pytest.raises(SystemExit):
            await Activities().run(Kind.ANSWER, "a", leave)

    run(main)
