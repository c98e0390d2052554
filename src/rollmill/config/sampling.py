"""How the next token is chosen. Names are those of SGLang's `sampling_params`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rollmill.config.base import Section


class SamplingConfig(Section):
    """Sampling parameters. A frozen value: no call can see another call's changes."""

    max_new_tokens: int = Field(1024, ge=1)
    """Most response tokens of one sample, over all its calls."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. RL wants 1: otherwise log-probs are of another distribution."""
    top_k: int = Field(-1, ge=-1)
    """Keep the k most probable tokens; -1 is off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less probable than min_p times the most probable one; 0 is off."""
    min_new_tokens: int = Field(0, ge=0)
    """No end of sequence before this many tokens."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from a token's logit per earlier occurrence in the response."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted once from the logit of a token that occurred in the response."""
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    """Divides positive, multiplies negative logits of tokens seen before; 1 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end the response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the response, besides the model's own end of sequence."""
    ignore_eos: bool = False
    """Go on to max_new_tokens whatever is sampled."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the response text (never out of the token ids)."""

    def to_wire(
        self, *, max_new_tokens: int, num_before: int = 0, seed: int | None = None
    ) -> dict[str, Any]:
        """The JSON object for `/generate`, with this call's token budget and seed.

        `num_before` response tokens are there already: they count for `min_new_tokens`, too.
        """
        params = self.model_dump()
        params["stop"] = list(self.stop)
        params["stop_token_ids"] = list(self.stop_token_ids)
        params["max_new_tokens"] = max_new_tokens
        params["min_new_tokens"] = min(max(0, self.min_new_tokens - num_before), max_new_tokens)
        if seed is not None:
            params["sampling_seed"] = seed
        return params
