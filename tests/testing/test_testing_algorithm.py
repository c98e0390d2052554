"""The contract checks of functions that run in the trainer."""

from pathlib import Path

import pytest

from rollmill.errors import HookError
from rollmill.testing import check_hook

EXAMPLES = Path(__file__).parents[2] / "examples" / "hooks"

HEAD = """
import torch
from rollmill.trainer.corrections import ImportanceWeights
from rollmill.trainer.losses import TokenLosses
"""
BROKEN = {
    "advantage of the wrong shape": (
        "advantage", "def f(inputs, config):\n    return [[0.0]] * len(inputs.masks)"),
    "advantage that is not finite": (
        "advantage", "def f(inputs, config):\n"
        "    return [mask * float('nan') for mask in inputs.masks]"),
    "advantage that raises": ("advantage", "def f(inputs, config):\n    return inputs.nothing"),
    "loss of the wrong shape": (
        "loss", "def f(tokens, config):\n    return TokenLosses(tokens.log_probs.sum())"),
    "loss without a gradient": (
        "loss", "def f(tokens, config):\n    return TokenLosses(-tokens.log_probs.detach())"),
    "loss that is not finite": (
        "loss", "def f(tokens, config):\n    return TokenLosses(tokens.log_probs / 0)"),
    "aggregation of the wrong shape": (
        "aggregation", "def f(step, config):\n    return [1.0]"),
    "importance weights of the wrong shape": (
        "importance_correction", "def f(tokens, config):\n"
        "    ones = torch.ones(tokens.num_sequences)\n"
        "    return ImportanceWeights(ones, ones)"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("advantage", "ranks"),
        ("loss", "tapered"),
        ("aggregation", "root_length"),
        ("importance_correction", "one_sided"),
    ],
)
def test_every_example_keeps_its_contract(name: str, function: str) -> None:
    check_hook(name, f"algorithm.py:{function}", base_dir=EXAMPLES)


@pytest.mark.parametrize("case", BROKEN)
def test_a_function_that_breaks_its_contract_is_found_out(tmp_path: Path, case: str) -> None:
    name, source = BROKEN[case]
    (tmp_path / "mine.py").write_text(HEAD + source, encoding="utf-8")
    with pytest.raises(HookError):
        check_hook(name, "mine.py:f", base_dir=tmp_path)
