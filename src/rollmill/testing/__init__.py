"""Contract tests for your own functions: does it do what its place in the run requires?

In a test of yours, or at a prompt:

    from rollmill.testing import check_hook

    check_hook("generate", "my_functions.py:generate")
    check_hook("reward", "my_functions.py:reward")

A check loads the function as a run does, calls it with small made-up samples and engines (no
model, no network) in the situations that a run brings about, and raises `HookError` with what was
expected and what was found. `FakeEngines` and the `make_…` functions serve tests of your own.
"""

from rollmill.testing.check import check_generate, check_hook, check_reward, check_source
from rollmill.testing.fakes import (
    FakeEngines,
    FakeTokenizer,
    make_batch,
    make_context,
    make_group,
    make_sample,
)

__all__ = [
    "FakeEngines",
    "FakeTokenizer",
    "check_generate",
    "check_hook",
    "check_reward",
    "check_source",
    "make_batch",
    "make_context",
    "make_group",
    "make_sample",
]
