"""What offline distillation must not be: the advantage frozen at the recorded log-probs.

A negative control for studies, as `trainer.algorithm.loss: frozen.py:frozen`. The advantage
log π_teacher − log π_sampled does not see where the student is by now, so the update never stops:
the student runs past its teacher.
"""

from rollmill.config.trainer import AlgorithmConfig
from rollmill.trainer.losses import TokenBatch, TokenLosses


def frozen(tokens: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """loss = −(log π_teacher − log π_sampled) · log π."""
    advantages = tokens.teacher_log_probs - tokens.rollout_log_probs
    return TokenLosses(-advantages * tokens.log_probs)
