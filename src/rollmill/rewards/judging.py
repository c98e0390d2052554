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
    """The outcomes of a user's function; what it raises is the `error` outcome of its answers."""
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
) -> list[Outcome]:
    """`call_function` for a coroutine function, with its time limit."""
    start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            rewards = await function.call_async(inputs)
    except TimeoutError as error:
        elapsed = time.perf_counter() - start
        kind = OutcomeKind.TIMEOUT if elapsed >= timeout_s else OutcomeKind.ERROR
        return [_outcome(kind, None, None, _told(error), start) for _ in inputs]
    except Exception as error:  # noqa: BLE001  (policy above)
        return [_outcome(OutcomeKind.ERROR, None, None, _told(error), start) for _ in inputs]
    return [_function_outcome(reward, start) for reward in rewards]


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
