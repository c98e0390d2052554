"""The worker pool: deadlines, deaths, cancellation, order, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollmill.config.reward import RewardConfig
from rollmill.errors import HookError, RewardError
from rollmill.rewards.judge import Judge
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rewards.protocol import Setup, encode, framed
from rollmill.sample import Sample

HERE = Path(__file__).parent
CHEAP = "random"
"""A type whose workers start four times as fast as those that load the mathematics library."""
EXPLODING = ("9^{9^{9^{9^{9}}}}", "\\sqrt{5^{5^{5^{5^{5}}}}}", "(9^{99999999})!")


def answer(response: str, label: Any = None, **fields: Any) -> Sample:
    return Sample([1, 2], response=response, label=label, **fields)


def custom(name: str, response: str = "x", **fields: Any) -> Sample:
    return answer(response, reward_function=f"reward_functions.py:{name}", **fields)


async def judge_all(judge: Judge, samples: list[Sample]) -> list[Outcome]:
    return list(await asyncio.gather(*(judge.judge(sample) for sample in samples)))


def kinds(outcomes: list[Outcome]) -> Counter[str]:
    return Counter(outcome.kind.value for outcome in outcomes)


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Look until a condition of another process holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (the condition is of another process)
            await asyncio.sleep(0.01)


def is_running(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(process_id: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process_id:
            found.append(int(stat.parent.name))
    return found


def test_answers_come_back_in_order(with_judge: Any) -> None:
    samples = [custom("length", "x" * n) for n in range(300)]

    outcomes = with_judge(lambda judge: judge_all(judge, samples), type=CHEAP, num_workers=2)

    assert [outcome.reward for outcome in outcomes] == [float(n) for n in range(300)]


@pytest.mark.parametrize("bomb", EXPLODING)
def test_an_exploding_answer_costs_one_answer(with_judge: Any, bomb: str) -> None:
    samples = [answer(rf"\boxed{{{k}}}", str(k)) for k in range(40)]
    samples.insert(20, answer(rf"\boxed{{{bomb}}}", r"\sqrt{2}+x"))

    outcomes = with_judge(lambda judge: judge_all(judge, samples), type="math", timeout_s=0.3)

    assert outcomes.pop(20).kind in (OutcomeKind.TIMEOUT, OutcomeKind.ERROR)
    assert all(outcome.reward == 1.0 for outcome in outcomes)


@pytest.mark.parametrize(
    "name", ["hangs", "sleeps", "blocks_the_loop", "waits_forever", "waits_on"]
)
def test_a_function_that_hangs_is_timed_out_alone(with_judge: Any, name: str) -> None:
    samples = [custom(name, "hang" if k == 3 else "go") for k in range(8)]

    outcomes = with_judge(lambda judge: judge_all(judge, samples), type=CHEAP, timeout_s=1.0)

    assert [o.kind for o in outcomes].index(OutcomeKind.TIMEOUT) == 3
    assert kinds(outcomes) == {"value": 7, "timeout": 1}


def test_a_death_costs_one_answer_and_says_how(with_judge: Any) -> None:
    samples = [custom("dies", "die" if k == 5 else "go") for k in range(12)]

    outcomes = with_judge(lambda judge: judge_all(judge, samples), type=CHEAP)

    assert kinds(outcomes) == {"value": 11, "error": 1}
    assert "exit code 3" in str(outcomes[5].detail)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("cancels_itself", "CancelledError"),
        ("exits", "exit code 1"),
        ("exits_in_a_coroutine", "exit code 1"),
        ("names_a_part_that_cannot_be_sent", "exit code 1"),
        ("closes_its_files", "died"),
        ("dies_and_leaves_a_child", "exit code 3"),
    ],
)
def test_what_a_function_does_to_its_process_costs_its_own_answer(
    with_judge: Any, name: str, told: str
) -> None:
    samples = [custom(name, "bad" if k == 3 else "go") for k in range(8)]

    outcomes = with_judge(lambda judge: judge_all(judge, samples), type=CHEAP, timeout_s=20.0)

    assert [outcome.kind for outcome in outcomes].index(OutcomeKind.ERROR) == 3
    assert kinds(outcomes) == {"value": 7, "error": 1}
    assert told in str(outcomes[3].detail)


@pytest.mark.parametrize("name", ["closes_its_files", "names_a_part_that_cannot_be_sent"])
def test_an_answer_whose_result_cannot_be_sent_is_not_graded_forever(
    with_judge: Any, name: str
) -> None:
    outcome = with_judge(lambda judge: judge.judge(custom(name, "bad")), type=CHEAP, timeout_s=20.0)

    assert outcome.kind is OutcomeKind.ERROR


@pytest.mark.parametrize("name", ["forks", "forks_and_exits"])
def test_a_function_that_forks_answers_once_and_leaves_no_second_grader(
    with_judge: Any, name: str
) -> None:
    async def work(judge: Judge) -> list[Outcome]:
        outcomes = await judge_all(judge, [custom(name, "fork") for _ in range(40)])
        (worker,) = judge.worker_process_ids()
        (grading,) = children_of(worker)
        await until(lambda: not any(map(is_running, children_of(grading))))
        return outcomes

    assert kinds(with_judge(work, type=CHEAP, num_workers=1, timeout_s=20.0)) == {"value": 40}


def test_large_results_of_coroutines_that_end_together_do_not_mix(with_judge: Any) -> None:
    async def work(judge: Judge) -> list[Outcome]:
        (worker,) = judge.worker_process_ids()
        outcomes = await judge_all(judge, [custom("many_parts") for _ in range(64)])
        assert judge.worker_process_ids() == [worker], "no frame was torn"
        return outcomes

    function = "reward_functions.py:many_parts"
    outcomes = with_judge(work, function=function, num_workers=1, timeout_s=60.0)

    assert {len(outcome.reward) for outcome in outcomes} == {10_000}


def test_a_process_that_coroutines_made_fat_is_replaced_under_load(with_judge: Any) -> None:
    samples = [custom("keeps_memory") for _ in range(300)]

    outcomes = with_judge(
        lambda judge: judge_all(judge, samples),
        function="reward_functions.py:keeps_memory",
        worker_memory_mb=256,
        timeout_s=20.0,
    )

    assert kinds(outcomes) == {"value": 300}, "600 MiB in all, and never more than the limit"
    assert len({outcome.reward for outcome in outcomes}) > 1


def test_no_answer_is_blamed_for_memory_that_others_kept(with_judge: Any) -> None:
    samples = [custom("keeps_much_memory") for _ in range(40)]

    outcomes = with_judge(
        lambda judge: judge_all(judge, samples),
        function="reward_functions.py:keeps_much_memory",
        worker_memory_mb=256,
        num_workers=1,
        timeout_s=20.0,
    )

    assert kinds(outcomes) == {"value": 40}, "full before the first look at the memory"
    assert len({outcome.reward for outcome in outcomes}) >= 3


def test_an_answer_that_needs_too_much_memory_is_an_error_in_any_process(with_judge: Any) -> None:
    name = "needs_too_much_memory"
    samples = [custom(name, "explode" if index % 5 == 0 else "fine") for index in range(20)]

    outcomes = with_judge(
        lambda judge: judge_all(judge, samples),
        function="reward_functions.py:needs_too_much_memory",
        worker_memory_mb=256,
        num_workers=1,
        timeout_s=20.0,
    )

    assert kinds(outcomes) == {"value": 16, "error": 4}
    assert [o.kind.value for o in outcomes[::5]] == ["error"] * 4


def test_a_worker_that_cannot_start_leaves_no_other_behind() -> None:
    async def main() -> list[int]:
        config = RewardConfig(function="reward_functions.py:missing", num_workers=3)
        judge = Judge(config, seed=0, base_dir=HERE)
        with pytest.raises(HookError):
            await judge.start()
        return children_of(os.getpid())

    before = set(children_of(os.getpid()))
    assert set(asyncio.run(main())) <= before


def test_files_of_killed_grading_processes_go_with_the_worker(
    with_judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    samples = [custom("leaves_a_file", "die"), custom("leaves_a_file", "go")]

    outcomes = with_judge(lambda judge: judge_all(judge, samples), type=CHEAP)

    assert kinds(outcomes) == {"error": 1, "value": 1}
    assert outcomes[1].reward == 2.0, "both files were in the worker's folder"
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded(with_judge: Any) -> None:
    samples = [custom("eats_memory"), custom("length", "abc")]

    outcomes = with_judge(
        lambda judge: judge_all(judge, samples), type="math", worker_memory_mb=256
    )

    assert outcomes[0].kind is OutcomeKind.ERROR
    assert "memory" in str(outcomes[0].detail).lower()
    assert outcomes[1].reward == 3.0


def test_coroutine_functions_overlap(with_judge: Any) -> None:
    samples = [custom("meets") for _ in range(40)]

    outcomes = with_judge(
        lambda judge: judge_all(judge, samples),
        function="reward_functions.py:meets",
        timeout_s=20.0,
    )

    assert kinds(outcomes) == {"value": 40}, "each waits until all 40 have begun"


def test_a_cancelled_call_returns_at_once_and_leaves_the_pool_healthy(with_judge: Any) -> None:
    async def work(judge: Judge) -> tuple[list[bool], Outcome]:
        doomed = asyncio.create_task(judge.judge(custom("sleeps", "hang")))
        queued = asyncio.create_task(judge.judge(custom("sleeps", "hang")))
        await until(lambda: judge.worker_process_ids())
        await asyncio.sleep(0)
        doomed.cancel()
        queued.cancel()
        for _ in range(3):  # turns of the event loop, not seconds
            await asyncio.sleep(0)
        are_cancelled = [doomed.cancelled(), queued.cancelled()]
        return are_cancelled, await judge.judge(answer(r"\boxed{5}", 5))

    are_cancelled, outcome = with_judge(work, type="math", timeout_s=0.5)

    assert are_cancelled == [True, True]
    assert outcome.reward == 1.0


def test_a_worker_that_is_killed_is_replaced_and_its_answers_are_graded(with_judge: Any) -> None:
    async def work(judge: Judge) -> list[Outcome]:
        waiting = asyncio.create_task(judge_all(judge, [custom("length", "x")] * 200))
        await asyncio.sleep(0)
        os.kill(judge.worker_process_ids()[0], signal.SIGKILL)
        return await waiting

    assert kinds(with_judge(work, type=CHEAP)) == {"value": 200}


def test_the_event_loop_keeps_turning_while_an_answer_explodes(with_judge: Any) -> None:
    async def work(judge: Judge) -> tuple[int, Outcome]:
        exploding = asyncio.create_task(judge.judge(answer(rf"\boxed{{{EXPLODING[0]}}}", "x")))
        num_turns = 0
        while not exploding.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns, await exploding

    num_turns, outcome = with_judge(work, type="math", timeout_s=0.1)

    assert outcome.kind is OutcomeKind.TIMEOUT
    assert num_turns > 100, "a loop that grades, or waits for who grades, turns a few times"


def test_close_stops_all_processes_and_fails_waiting_calls() -> None:
    async def main() -> tuple[list[int], Any]:
        judge = Judge(RewardConfig(type=CHEAP), seed=0, base_dir=HERE)
        await judge.start()
        ids = judge.worker_process_ids()
        ids += [child for one in ids for child in children_of(one)]
        waiting = asyncio.create_task(judge.judge(custom("sleeps", "hang")))
        await asyncio.sleep(0)
        await judge.close()
        (result,) = await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: not any(map(is_running, ids)))
        return ids, result

    ids, result = asyncio.run(main())

    assert len(ids) == 2
    assert isinstance(result, RewardError)


def test_workers_end_when_the_run_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio\n"
        "from pathlib import Path\n"
        "from rollmill.config.reward import RewardConfig\n"
        "from rollmill.rewards.judge import Judge\n"
        "from rollmill.sample import Sample\n"
        "async def main():\n"
        f"    config = RewardConfig(type={CHEAP!r})\n"
        f"    async with Judge(config, seed=0, base_dir=Path({str(HERE)!r})) as j:\n"
        "        print(j.worker_process_ids()[0], flush=True)\n"
        "        name = 'reward_functions.py:hangs'\n"
        "        await j.judge(Sample([1], response='hang', reward_function=name))\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline())

    async def check() -> None:
        await until(lambda: len(children_of(worker)) == 1)
        processes = [worker, *children_of(worker)]
        run.kill()
        await until(lambda: not any(map(is_running, processes)))

    asyncio.run(check())
    run.wait()


def test_workers_do_not_import_torch(with_judge: Any, tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(
        "import sys\ndef reward(sample):\n    return float('torch' in sys.modules)\n"
    )
    sample = answer("x", reward_function=f"{tmp_path}/looks.py:reward")

    outcome = with_judge(lambda judge: judge.judge(sample), type="math")

    assert outcome.reward == 0.0


def test_a_function_that_does_not_fit_stops_the_start() -> None:
    async def main() -> None:
        config = RewardConfig(function="reward_functions.py:two_parameters")
        async with Judge(config, seed=0, base_dir=HERE):
            pass

    with pytest.raises(HookError) as caught:
        asyncio.run(main())
    assert "sample: RewardInput" in str(caught.value)
    assert "(response: str, label: str)" in str(caught.value)


def test_an_unknown_type_stops_the_start_with_the_nearest_name() -> None:
    async def main() -> None:
        async with Judge(RewardConfig(type="boxed_maths"), seed=0, base_dir=HERE):
            pass

    with pytest.raises(RewardError, match="boxed_math"):
        asyncio.run(main())


def test_an_unknown_setting_of_a_type_stops_the_start() -> None:
    async def main() -> None:
        config = RewardConfig(type="math", params={"require_bax": True})
        async with Judge(config, seed=0, base_dir=HERE):
            pass

    with pytest.raises(RewardError, match="require_box"):
        asyncio.run(main())


def test_bombs_one_after_the_other_cost_their_own_limit_each(with_judge: Any) -> None:
    """A successor that hangs on its very first answer is noticed as quickly as any other."""
    samples = [answer(rf"\boxed{{{EXPLODING[0]}}}", "x") for _ in range(20)]

    outcomes = with_judge(lambda judge: judge_all(judge, samples), type="math", timeout_s=0.1)

    assert kinds(outcomes)["timeout"] == 20
    assert {outcome.detail for outcome in outcomes} == {"passed the time limit of 0.1 s"}


def test_what_is_killed_is_replaced_and_reaped(with_judge: Any) -> None:
    async def work(judge: Judge) -> None:
        bombs = [custom("hangs", "hang" if k % 2 else "go") for k in range(6)]
        assert kinds(await judge_all(judge, bombs)) == {"value": 3, "timeout": 3}
        (worker,) = judge.worker_process_ids()
        # The grading process, perhaps its spare, and no zombie of those before.
        await until(lambda: all(map(is_running, children_of(worker))))
        assert 1 <= len(children_of(worker)) <= 2

    with_judge(work, type=CHEAP, num_workers=1, timeout_s=1.0)


def test_a_spare_is_made_in_time_and_loads_no_function_before_it_grades(
    with_judge: Any, tmp_path: Path
) -> None:
    """A user's module may hold a model: it is loaded by the process that grades, once."""
    loads = tmp_path / "loads.txt"
    (tmp_path / "loading.py").write_text(
        "import os\n"
        f"with open({str(loads)!r}, 'a') as file:\n    file.write(f'{{os.getpid()}} ')\n"
        "def reward(sample):\n"
        "    while sample.response == 'hang':\n        pass\n"
        "    return float(os.getpid())\n"
    )
    function = f"{tmp_path}/loading.py:reward"

    async def work(judge: Judge) -> None:
        first = await judge.judge(answer("go"))
        (worker,) = judge.worker_process_ids()
        (grading,) = children_of(worker)
        hanging = asyncio.create_task(judge.judge(answer("hang")))
        await until(lambda: len(children_of(worker)) == 2)
        (spare,) = set(children_of(worker)) - {grading}
        assert loads.read_text().split() == [str(grading)]
        assert (await hanging).kind is OutcomeKind.TIMEOUT
        second = await judge.judge(answer("go"))
        assert (first.reward, second.reward) == (grading, spare)
        assert loads.read_text().split() == [str(grading), str(spare)]

    with_judge(work, function=function, num_workers=1, timeout_s=1.0)


def test_a_spare_that_died_is_made_up_for(with_judge: Any) -> None:
    async def work(judge: Judge) -> None:
        await judge.judge(custom("hangs", "go"))
        (worker,) = judge.worker_process_ids()
        (grading,) = children_of(worker)
        hanging = asyncio.create_task(judge.judge(custom("hangs", "hang")))
        await until(lambda: len(children_of(worker)) == 2)
        (spare,) = set(children_of(worker)) - {grading}
        os.kill(spare, signal.SIGKILL)
        assert (await hanging).kind is OutcomeKind.TIMEOUT
        assert (await judge.judge(custom("hangs", "go"))).reward == 1.0
        assert judge.worker_process_ids() == [worker]

    with_judge(work, type=CHEAP, num_workers=1, timeout_s=1.0)


def test_a_worker_whose_run_is_gone_ends_quietly(tmp_path: Path) -> None:
    """A run that is killed leaves messages unread: that is no error of the worker's."""
    ours, theirs = socket.socketpair()
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "rollmill.rewards.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    setup = Setup(
        config=RewardConfig(type=CHEAP).model_dump_json(),
        base_dir=str(tmp_path),
        seed=0,
        graders=(CHEAP,),
    )
    ours.sendall(framed(encode(setup)))
    readable, _, _ = select.select([ours], [], [], 60)
    assert readable, "the worker says that it is ready"
    ours.close()
    _, errors = worker.communicate(timeout=60)
    assert (worker.returncode, errors) == (0, "")
