"""Checks of instructions that a program can verify: those of IFEval and of IFBench.

One table from instruction id to a pure function of the answer and the instruction's arguments, in
three files by origin and kind. Ids and arguments are those of the public data sets (IFEval, arXiv
2311.07911; IFBench, arXiv 2507.02833). Nothing is downloaded: instructions that need a trained
tagger or a pronouncing dictionary (`words:start_verb`, `words:odd_even_syllables`,
`language:response_language` beyond scripts) are named as unsupported instead of guessed.
"""

from __future__ import annotations

from rollmill.rewards.graders.instructions import bench_formats, bench_words, ifeval
from rollmill.rewards.graders.instructions.texts import Check

CHECKS: dict[str, Check] = {**ifeval.CHECKS, **bench_words.CHECKS, **bench_formats.CHECKS}
"""Every instruction that can be checked."""

__all__ = ["CHECKS", "Check"]
