"""Ending tasks for certain: the one place where rollouts wait for what they cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long cancelled tasks may take to end. Code that swallows its cancellation is left behind."""
PATIENCE_S = 0.5


async def end_all(
    tasks: Iterable[asyncio.Future[Any]], *, first_wait_s: float = 0.0, grace_s: float = GRACE_S
) -> None:
    """Wait for the tasks, cancelling them (again and again) after `first_wait_s` seconds.

    Returns when all have ended, or after `grace_s` more seconds with a warning. A cancellation of
    the caller meanwhile makes it hurry and is raised at the end.
    """
    loop = asyncio.get_running_loop()
    left = {task for task in tasks if not task.done()}
    wait_s, give_up_at = first_wait_s, loop.time() + first_wait_s + grace_s
    cancelled: asyncio.CancelledError | None = None
    while left and loop.time() < give_up_at:
        if not wait_s:
            for task in left:
                task.cancel()
        try:
            _, left = await asyncio.wait(left, timeout=wait_s or PATIENCE_S)
        except asyncio.CancelledError as error:
            cancelled = error
            left = {task for task in left if not task.done()}
        wait_s = 0.0
    if left:
        logger.warning("%d tasks did not end within %g s of being cancelled", len(left), grace_s)
    if cancelled is not None:
        raise cancelled
