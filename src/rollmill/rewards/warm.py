"""Getting ready before the fork: what every grading process would otherwise do again.

Importing the libraries takes about a second and the first use of the mathematics parser half of
one, as it builds its tables. Done once in the watching process, a successor of a killed grading
process has all of it from the start and costs milliseconds.

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

_EXPRESSIONS = (
    ("x^2+2x+1", "(x+1)^2"), (r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ"), (r"\log_2 8", r"\ln x"),
    ("x>2", r"(2,\infty)"), (r"(1,2)\cup[3,4]", r"\{1,2\}"), ("x+y=3", "y=3-x"),
    ("|x|", r"\binom{n}{2}"),
    (r"\begin{pmatrix}a&b\\1&2\end{pmatrix}", r"\int_0^1 x dx"), (r"\lfloor x\rfloor", "5 km"),
)  # fmt: skip


def warm_up(setup: Setup) -> None:
    """Load the graders of the set-up and use the mathematics library once."""
    config = RewardConfig.model_validate_json(setup.config)
    table = GraderTable(config, base_dir=Path(setup.base_dir), seed=setup.seed)
    for name in setup.graders:
        if not is_function_path(name):
            with contextlib.suppress(RollmillError):  # the grading process will report it
                table.get(name)
    types = {base_type(name) for name in setup.graders}
    if not types or types & MATHEMATICAL:
        _warm_mathematics()
    gc.collect()
    gc.freeze()  # the collector of a successor must not touch, and so copy, what is shared


def _warm_mathematics() -> None:
    from rollmill.rewards.graders.math import MathGrader, MathParams
    from rollmill.rewards.mathematics.symbolic import expressions_equal

    grader = MathGrader(MathParams())
    for left, right in _EXPRESSIONS:
        expressions_equal(left, right)
        judge_with(grader, RewardInput(response=rf"\boxed{{{left}}}", label=right))
