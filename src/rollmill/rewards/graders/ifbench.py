"""`ifbench`: instructions that a program can verify, from the row's metadata.

`metadata.instruction_id_list` names the instructions, `metadata.kwargs` has the arguments of each
(a list of mappings, or its JSON text). Checking is strict: the answer as it is, no second try with
lines taken off.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from rollmill.rewards.graders.base import GradingError, Params, Score
from rollmill.rewards.graders.instructions import CHECKS
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.mathematics.extract import after_thinking


class IfbenchParams(Params):
    """Settings of `ifbench`."""

    partial_credit: bool = False
    """Share of instructions followed; off, 1 for all of them and 0 otherwise."""


class IfbenchGrader:
    """1 when all instructions are followed, else 0."""

    def __init__(self, params: IfbenchParams) -> None:
        self._params = params

    def extract(self, item: RewardInput) -> str | None:
        """All that follows the reasoning; an empty answer follows nothing."""
        answer = after_thinking(item.response)
        return answer if answer.strip() else None

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """Check each instruction."""
        instructions = _instructions(item)  # the same one may come twice, with other arguments
        missed = [name for name, given in instructions if not _follows(name, answer, given)]
        share = 1 - len(missed) / len(instructions)
        detail = f"not followed: {', '.join(missed)}" if missed else None
        reward = share if self._params.partial_credit else float(not missed)
        return Score(reward, detail, extracted=answer[:200])


def _follows(name: str, answer: str, given: dict[str, Any]) -> bool:
    check = CHECKS.get(name)
    if check is None:
        close = difflib.get_close_matches(name, CHECKS, n=1)
        hint = f" (the nearest is {close[0]!r})" if close else ""
        raise GradingError(f"the instruction {name!r} is not supported{hint}")
    try:
        return check(answer.strip(), given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GradingError(f"instruction {name!r}: bad arguments {given}: {error!r}") from error


def _instructions(item: RewardInput) -> list[tuple[str, dict[str, Any]]]:
    names = item.metadata.get("instruction_id_list")
    arguments = item.metadata.get("kwargs")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise GradingError(f"metadata.kwargs is not JSON: {error}") from error
    if not isinstance(names, list) or not names:
        raise GradingError("expected metadata.instruction_id_list with instructions, found none")
    arguments = [{}] * len(names) if arguments is None else arguments
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise GradingError(
            f"expected metadata.kwargs with {len(names)} mappings, found {arguments}"
        )
    prompt = item.metadata.get("prompt_text") or item.metadata.get("prompt")
    pairs = []
    for name, given in zip(names, arguments, strict=True):
        known = {key: value for key, value in (given or {}).items() if value is not None}
        if prompt and "prompt_to_repeat" not in known:
            known["prompt_to_repeat"] = prompt
        pairs.append((str(name), known))
    return pairs
