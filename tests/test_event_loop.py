"""The event loop: bursts are spread over turns, and no event goes to the wrong reader."""

from __future__ import annotations

import asyncio
import os
import socket

from rollmill.event_loop import EVENTS_PER_TURN, new_event_loop


def run(main: object) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)  # type: ignore[arg-type]


def test_a_burst_of_readable_sockets_is_spread_over_turns() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(5 * EVENTS_PER_TURN)]
        read: list[int] = []
        per_turn: list[int] = []
        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")
            loop.add_reader(ours, lambda n=number, s=ours: (s.recv(1), read.append(n)))
        before = 0
        while len(read) < len(pairs):
            await asyncio.sleep(0)
            per_turn.append(len(read) - before)
            before = len(read)
        assert max(per_turn) <= EVENTS_PER_TURN
        assert sorted(read) == list(range(len(pairs)))
        for ours, theirs in pairs:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()

    run(main())


def test_a_reader_that_takes_a_closed_ones_place_sees_only_its_own_events() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(3 * EVENTS_PER_TURN)]
        for _, theirs in pairs:
            theirs.send(b"old")
        seen: list[str] = []
        new: list[tuple[int, int]] = []

        def replace_all() -> None:
            """On the first event: close every other socket and reuse the descriptors."""
            for ours, _ in pairs:
                loop.remove_reader(ours)
                ours.close()
            for _ in pairs:
                ends = os.pipe()
                new.append(ends)
                loop.add_reader(ends[0], seen.append, "too early")

        for ours, _ in pairs:
            loop.add_reader(ours, lambda: new or replace_all())
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(new) == len(pairs)
        assert seen == []
        arrived = asyncio.Event()
        loop.add_reader(new[-1][0], arrived.set)
        os.write(new[-1][1], b"new")
        await asyncio.wait_for(arrived.wait(), 5)
        for ends in new:
            loop.remove_reader(ends[0])
            os.close(ends[0])
            os.close(ends[1])
        for _, theirs in pairs:
            theirs.close()

    run(main())


def test_timers_and_connections_work_as_on_any_loop() -> None:
    async def main() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def ask(number: int) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"%d\n" % number)
            answer = await reader.readline()
            writer.close()
            return answer

        async with asyncio.timeout(10):
            answers = await asyncio.gather(*(ask(number) for number in range(40)))
        assert answers == [b"%d\n" % number for number in range(40)]
        server.close()

    run(main())
