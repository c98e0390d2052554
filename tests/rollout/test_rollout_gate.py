"""The gate: never above its limit, nobody in after it closed, nobody left waiting."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.rollout.gate import Gate, GateClosed


def test_a_gate_for_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 or more, found 0"):
        Gate(0)


def test_requests_enter_in_order_of_arrival_and_never_above_the_limit() -> None:
    async def main() -> None:
        gate = Gate(2)
        order: list[int] = []
        leave = asyncio.Event()

        async def request(number: int) -> None:
            async with gate:
                order.append(number)
                assert gate.num_inside <= 2
                await leave.wait()

        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(request(number))
            await asyncio.sleep(0)
            assert order == [0, 1]
            leave.set()
        assert order == [0, 1, 2, 3, 4]
        assert gate.num_inside == 0
        assert gate.high_water == 2

    asyncio.run(main())


def test_closing_tells_everybody_who_waits_and_lets_nobody_in() -> None:
    async def main() -> None:
        gate = Gate(1)
        async with gate:
            waiting = [asyncio.create_task(gate.__aenter__()) for _ in range(3)]
            await asyncio.sleep(0)
            gate.close()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(result, GateClosed) for result in results)
            with pytest.raises(GateClosed):
                await gate.__aenter__()
        gate.open()
        async with gate:
            assert gate.num_inside == 1

    asyncio.run(main())


def test_a_place_handed_over_just_before_closing_is_not_taken() -> None:
    async def main() -> None:
        gate = Gate(1)
        await gate.__aenter__()
        waiter = asyncio.create_task(gate.__aenter__())
        await asyncio.sleep(0)
        await gate.__aexit__()  # the place is handed over; the waiter has not run yet
        gate.close()
        with pytest.raises(GateClosed):
            await waiter
        assert gate.num_inside == 0

    asyncio.run(main())


def test_work_under_an_open_gate_gives_its_result_and_its_errors() -> None:
    async def broken() -> None:
        raise KeyError("mine")

    async def main() -> None:
        gate = Gate(1)
        assert await gate.unless_closed(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(KeyError):
            await gate.unless_closed(broken())

    asyncio.run(main())


def test_closing_cancels_the_work_under_the_gate() -> None:
    async def main() -> None:
        gate = Gate(1)
        ended = asyncio.Event()

        async def slow() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        task = asyncio.create_task(gate.unless_closed(slow()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.close()
        with pytest.raises(GateClosed):
            await task
        assert ended.is_set()
        with pytest.raises(GateClosed):
            await gate.unless_closed(asyncio.sleep(0))

    asyncio.run(main())


def test_a_cancelled_caller_is_cancelled_and_its_work_too() -> None:
    async def main() -> None:
        gate = Gate(1)
        work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(gate.unless_closed(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.cancelled()

    asyncio.run(main())


ACTIONS = st.lists(
    st.sampled_from(["enter", "leave", "cancel", "close", "open", "turn"]), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, limit=st.integers(1, 3))
def test_whatever_happens_the_limit_holds_and_nobody_waits_beside_a_free_place(
    actions: list[str], limit: int
) -> None:
    async def main() -> None:
        gate = Gate(limit)
        inside: list[asyncio.Event] = []
        tasks: list[asyncio.Task[None]] = []
        entered_closed = 0

        async def request() -> None:
            nonlocal entered_closed
            leave = asyncio.Event()
            async with gate:
                entered_closed += gate.is_closed
                assert gate.num_inside <= limit
                inside.append(leave)
                try:
                    await leave.wait()
                finally:
                    inside.remove(leave)

        for action in actions:
            if action == "enter":
                tasks.append(asyncio.create_task(request()))
            elif action == "leave" and inside:
                inside[0].set()
            elif action == "cancel" and tasks:
                tasks[len(tasks) // 2].cancel()
            elif action == "close":
                gate.close()
            elif action == "open":
                gate.open()
            elif action == "turn":
                await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)
        num_waiting = sum(not task.done() for task in tasks) - len(inside)
        assert gate.num_inside == len(inside) <= limit
        assert num_waiting == 0 or (len(inside) == limit and not gate.is_closed)
        assert entered_closed == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.num_inside == 0

    asyncio.run(main())
