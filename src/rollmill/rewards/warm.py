"""Getting ready before it counts: what every grading process would otherwise do again.

Importing the libraries takes about a second and the first use of the mathematics parser half of
one, as it builds its tables. Done once in the watching process, each fork has all of it from the
start. What is left to a fork is to take possession: its first answers write to memory that is
still shared, and every such page is copied then. A spare does that while it waits.

Only our own graders run here, on fixed texts: no answer and no user function.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

from rollmill.config.reward import RewardConfig
from rollmill.errors import RollmillError
from rollmill.rewards.functions import is_function_path
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.judging import judge_with
from rollmill.rewards.protocol import Setup
from rollmill.rewards.registry import GraderTable, base_type

MATHEMATICAL = frozenset(("math", "deepscaler", "dapo"))
"""Types that use the mathematics library. Without any set type, rows may ask for them."""

_TYPICAL = (
    ("{n}", "{n}"), ("{n}.5", r"\frac{{{m}}}{{2}}"), (r"\frac{{{n}}}{{{m}}}", "{n}/{m}"),
    (r"{n}\sqrt{{{m}}}", r"\sqrt{{{m}}}"),
    (r"\frac{{\sqrt{{{n}}}}}{{{m}}}", r"\frac{{{n}\pi}}{{{m}}}"),
    ("x^2+{n}x+{m}", "(x+{n})(x+1)"), ("2^{{{n}}}-{m}", r"{n}\cdot 10^{{{m}}}"),
    ("{n},{m}", "{m},{n}"), (r"\text{{Monday {n}}}", "Tuesday {n}"),
    (
        r"\begin{{pmatrix}}{n}&{m}\\1&0\end{{pmatrix}}",
        r"\begin{{bmatrix}}{n}&{m}\\1&2\end{{bmatrix}}",
    ),
)  # fmt: skip
"""Pairs of the commonest forms; other numbers each time, as parsed texts are remembered."""
_RARE = (
    (r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ"), (r"\log_2 8", r"\ln x"), ("x>2", r"(2,\infty)"),
    (r"(1,2)\cup[3,4]", r"\{1,2\}"), ("|x|", r"\binom{n}{2}"),
    ("(1,2)", r"\left(1,\infty\right)"), ("y=2x+1", "2x-y=1"),
    (r"\begin{pmatrix}a&b\\1&2\end{pmatrix}", r"\int_0^1 x dx"), (r"\lfloor x\rfloor", "5 km"),
)  # fmt: skip
_ROUNDS = 20
"""Python makes code quicker once it has run some ten times; a fork inherits that."""


def warm_up(setup: Setup) -> None:
    """In the watching process: load the graders of the set-up and use the mathematics library."""
    config = RewardConfig.model_validate_json(setup.config)
    table = GraderTable(config, base_dir=Path(setup.base_dir), seed=setup.seed)
    _load_builtin(table, setup.graders)
    if _needs_mathematics(setup.graders):
        from rollmill.rewards.mathematics.symbolic import expressions_equal

        for left, right in _RARE:
            expressions_equal(left, right)
            _grade(left, right)
        for n in range(_ROUNDS):
            _grade_typical(n)
    gc.collect()
    gc.freeze()  # the collector of a fork must not touch, and so copy, what is shared


def get_ready(table: GraderTable, graders: tuple[str, ...]) -> None:
    """In a fork: load the built-in graders and write once to the memory that grading writes to."""
    _load_builtin(table, graders)
    if _needs_mathematics(graders):
        _grade_typical(_ROUNDS)


def _load_builtin(table: GraderTable, graders: tuple[str, ...]) -> None:
    for name in graders:
        if not is_function_path(name):
            with contextlib.suppress(RollmillError):  # reported when grading begins
                table.get(name)


def _needs_mathematics(graders: tuple[str, ...]) -> bool:
    types = {base_type(name) for name in graders}
    return not types or bool(types & MATHEMATICAL)


def _grade_typical(n: int) -> None:
    for left, right in _TYPICAL:
        _grade(left.format(n=n + 2, m=n + 3), right.format(n=n + 2, m=n + 3))


def _grade(left: str, right: str) -> None:
    from rollmill.rewards.graders.math import MathGrader, MathParams

    answer = RewardInput(response=rf"So it is $\boxed{{{left}}}$.", label=right)
    judge_with(MathGrader(MathParams()), answer)
