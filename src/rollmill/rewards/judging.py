"""One answer in, one outcome out, whatever happens on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rollmill.rewards.functions import CustomReward
from rollmill.rewards.graders.base import Grader, GradingError, Score
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.outcome import MAX_DETAIL_CHARS, Outcome, OutcomeKind
from rollmill.sample import Reward

CANCEL_S = 0.5
"""Time that a cancelled coroutine has to tidy up."""


def judge_with(grader: Grader, item: RewardInput) -> Outcome:
    """The outcome of a built-in grader. Never raises (save MemoryError, which ends a worker).

    Policy: whatever a grader raises on one answer is that answer's `error` outcome.
    """
    start = time.perf_counter()
    answer: str | None = None
    score: Score | None = None
    try:
        answer = grader.extract(item)
        if answer is not None:
            score = grader.score(answer, item)
    except GradingError as error:
        return _outcome(OutcomeKind.ERROR, None, answer, str(error), start)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (policy above)
        return _outcome(OutcomeKind.ERROR, None, answer, _told(error), start)
    if score is None:
        return _outcome(OutcomeKind.INVALID, None, answer, "no answer found", start)
    shown = answer if score.extracted is None else score.extracted
    return _outcome(OutcomeKind.VALUE, score.reward, shown, score.detail, start)


def call_function(function: CustomReward, inputs: Sequence[RewardInput]) -> list[Outcome]:
    """The outcomes of a user's function; what it raises is the `error` outcome of its answers.

    Raises:
        MemoryError: the process is full; whose fault that is, only the caller can tell.
    """
    start = time.perf_counter()
    try:
        rewards = function.call(inputs)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (policy above)
        return [_outcome(OutcomeKind.ERROR, None, None, _told(error), start) for _ in inputs]
    return [_function_outcome(reward, start) for reward in rewards]


async def call_coroutine_function(
    function: CustomReward, inputs: Sequence[RewardInput], timeout_s: float
) -> tuple[list[Outcome], bool]:
    """`call_function` for a coroutine function, with its time limit; and whether it has ended.

    A coroutine that does not let itself be cancelled (a bare `except:` around its waiting) is left
    to itself: the outcome does not wait for it.

    Raises:
        MemoryError: as `call_function`.
    """
    start = time.perf_counter()
    call = asyncio.ensure_future(function.call_async(inputs))
    await asyncio.wait((call,), timeout=timeout_s)
    if not call.done():
        call.cancel()
        await asyncio.wait((call,), timeout=CANCEL_S)
        detail = f"passed the time limit of {timeout_s:g} s"
        timed_out = _outcome(OutcomeKind.TIMEOUT, None, None, detail, start)
        return [timed_out] * len(inputs), call.done()
    try:
        rewards = call.result()
    except MemoryError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (as in call_function)
        told = _told(error)
        return [_outcome(OutcomeKind.ERROR, None, None, told, start) for _ in inputs], True
    return [_function_outcome(reward, start) for reward in rewards], True


def _function_outcome(reward: Reward | None, start: float) -> Outcome:
    kind = OutcomeKind.INVALID if reward is None else OutcomeKind.VALUE
    return _outcome(kind, reward, None, None, start)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _outcome(
    kind: OutcomeKind,
    reward: Reward | None,
    extracted: str | None,
    detail: str | None,
    start: float,
) -> Outcome:
    return Outcome(
        kind, reward, _text(extracted), _text(detail), round(time.perf_counter() - start, 6)
    )


def _text(text: str | None) -> str | None:
    if text is None:
        return None
    return text[:MAX_DETAIL_CHARS].encode("utf-8", "replace").decode("utf-8")
