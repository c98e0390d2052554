from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.admission import Admission


def test_requests_enter_in_order_of_arrival() -> None:
    async def main() -> None:
        gate = Admission(1)
        assert await gate.enter()
        order: list[int] = []

        async def visit(number: int) -> None:
            assert await gate.enter()
            order.append(number)
            gate.leave()

        tasks = [asyncio.create_task(visit(i)) for i in range(5)]
        await asyncio.sleep(0)
        assert gate.num_waiting == 5
        gate.leave()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]
        assert gate.num_inside == 0

    asyncio.run(main())


def test_a_closed_gate_lets_nobody_in_until_it_opens() -> None:
    async def main() -> None:
        gate = Admission(2)
        gate.close()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        assert gate.num_inside == 0
        gate.open()
        assert await waiting

    asyncio.run(main())


def test_those_who_wait_can_be_sent_away() -> None:
    async def main() -> None:
        gate = Admission(1)
        assert await gate.enter()
        waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        assert gate.abort_waiting() == 3
        assert await asyncio.gather(*waiting) == [False, False, False]
        assert gate.num_inside == 1

    asyncio.run(main())


def test_one_cancelled_in_the_moment_of_admission_gives_its_place_back() -> None:
    async def main() -> None:
        gate = Admission(1)
        assert await gate.enter()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.leave()  # admits it ...
        waiting.cancel()  # ... before it could run
        await asyncio.gather(waiting, return_exceptions=True)
        assert gate.num_inside == 0

    asyncio.run(main())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_the_limit_is_never_exceeded_and_no_place_is_lost(maximum: int, seed: int) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        gate = Admission(maximum)

        async def visit() -> None:
            if not await gate.enter():
                return
            try:
                assert gate.num_inside <= maximum
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                gate.leave()

        tasks = []
        for _ in range(30):
            tasks.append(asyncio.create_task(visit()))
            match draw.randrange(8):
                case 0:
                    draw.choice(tasks).cancel()
                case 1:
                    gate.close()
                case 2:
                    gate.open()
                case 3:
                    gate.abort_waiting()
                case _:
                    await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.num_inside == 0
        assert gate.num_waiting == 0
        assert not any(
            not task.cancelled() and isinstance(task.exception(), AssertionError) for task in tasks
        )

    asyncio.run(main())
