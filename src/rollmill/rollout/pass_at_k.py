"""pass@k, the chance that at least one of k answers to a prompt is right."""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Unbiased estimate for one prompt: 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1, as a product
    so that no large number appears.

    Args:
        num_answers: n, answers that were judged; at least k.
        num_right: c, how many of them are right.
        k: answers one may give.

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_answers or not 0 <= num_right <= num_answers:
        raise ValueError(f"pass@{k} of {num_right} right among {num_answers} is not defined")
    all_wrong = 1.0
    for i in range(k):
        all_wrong *= max(0, num_answers - num_right - i) / (num_answers - i)
    return 1.0 - all_wrong


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Mean over prompts of pass@k; prompts with fewer than k answers are left out.

    Args:
        counts: (answers, right answers) of each prompt.
        k: answers one may give.

    Returns:
        The mean, or None when no prompt has k answers.
    """
    values = [pass_at_k(n, right, k) for n, right in counts if n >= k]
    return sum(values) / len(values) if values else None
