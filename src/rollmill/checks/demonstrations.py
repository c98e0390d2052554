"""Checks of recorded answers: what of them is learned, shown on one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmill.checks.finding import Finding, from_error, ok, warning
from rollmill.config import Config
from rollmill.data import PromptRow
from rollmill.data.demonstrations import Demonstration, DemonstrationSet, load_demonstrations
from rollmill.errors import RollmillError
from rollmill.loop.policy import Policy
from rollmill.models import end_ids_of

MAX_LEFT_OUT = 0.05
"""Share of rows left out or cut from which it is worth a warning."""
SHOWN_CHARS = 400
LEARNED = ("⟦", "⟧")


def load_recorded(
    config: Config, policy: Policy, base_dir: Path, findings: list[Finding]
) -> list[Demonstration]:
    """The training rows; what there is to say about reading them goes to `findings`."""
    try:
        recorded = load_demonstrations(
            config.data,
            tokenizer=policy.tokenizer,
            context_length=policy.context_length,
            base_dir=base_dir,
        )
    except RollmillError as problem:
        findings.append(from_error("data", problem))
        return []
    findings += _amounts(recorded)
    return recorded.rows


def _amounts(recorded: DemonstrationSet) -> Iterator[Finding]:
    rows = recorded.rows
    num_tokens = sum(len(row.prompt_tokens) + len(row.answer_tokens) for row in rows)
    num_learned = sum(int(row.mask.sum()) for row in rows)
    yield ok(
        "data",
        f"{len(rows)} samples from {recorded.num_read} rows, {num_learned} of {num_tokens} tokens "
        f"learned, {recorded.num_bad} bad, {recorded.num_too_long} too long, "
        f"{recorded.num_truncated} cut",
    )
    left_out = recorded.num_bad + recorded.num_too_long + recorded.num_truncated
    share = left_out / max(1, len(rows) + recorded.num_bad + recorded.num_too_long)
    if share > MAX_LEFT_OUT:
        yield warning(
            "data",
            f"{share:.0%} of the samples are left out or cut",
            "mend the rows, or raise data.sft.max_tokens or model.context_length",
        )


def check_recorded(
    config: Config,
    policy: Policy,
    train: Sequence[PromptRow],
    evals: Mapping[str, Sequence[PromptRow]],
) -> Iterator[Finding]:
    """An example with its mask, ends of answers, copies, and overlap with evaluation sets."""
    rows = [row for row in train if isinstance(row, Demonstration)]
    if not rows:
        return
    yield ok("mask", f"{rows[0].row_id}, learned in {''.join(LEARNED)}: {shown(policy, rows[0])}")
    yield from _ends(config, policy, rows)
    copies = len(rows) - len({_identity(row) for row in rows})
    if copies:
        yield warning(
            "data",
            f"{copies} samples occur more than once",
            "remove the copies unless they are meant",
        )
    if len(rows) < config.rollout.batch_size:
        yield warning(
            "data",
            f"{len(rows)} samples fill less than one batch of {config.rollout.batch_size}: they "
            "repeat within a step",
            "add rows or make rollout.batch_size smaller",
        )
    yield from _overlap(rows, evals)


def _overlap(
    rows: Sequence[Demonstration], evals: Mapping[str, Sequence[PromptRow]]
) -> Iterator[Finding]:
    prompts = {row.prompt_tokens.tobytes() for row in rows}
    for name, asked in evals.items():
        shared = sum(row.prompt_tokens.tobytes() in prompts for row in asked)
        if shared:
            yield warning(
                f"eval {name}",
                f"{shared} of {len(asked)} prompts are in the training data too",
                "take them out of the training data: a score on them means nothing",
            )


def shown(policy: Policy, row: Demonstration) -> str:
    """The sample as text, the learned parts in brackets; the middle of a long one is left out."""
    tokenizer = policy.tokenizer
    parts = [_decoded(tokenizer, row.prompt_tokens)]
    for segment in row.segments:
        text = _decoded(tokenizer, segment.token_ids)
        parts.append(f"{LEARNED[0]}{text}{LEARNED[1]}" if segment.trainable else text)
    whole = "".join(parts)
    if len(whole) > SHOWN_CHARS:
        whole = f"{whole[: SHOWN_CHARS // 2]} … {whole[-SHOWN_CHARS // 2 :]}"
    return repr(whole)


def _ends(config: Config, policy: Policy, rows: Sequence[Demonstration]) -> Iterator[Finding]:
    """Answers must end with a token on which the engine stops, or generation runs on."""
    stops = {
        *end_ids_of(policy.folder),
        policy.tokenizer.eos_token_id,
        *config.rollout.sampling.stop_token_ids,
    }
    ends = Counter(int(row.answer_tokens[-1]) for row in rows if not row.is_truncated)
    for token, count in ends.items():
        if token not in stops:
            text = _decoded(policy.tokenizer, [token])
            yield warning(
                "end of turn",
                f"{count} answers end with {text!r} ({token}), on which engines do not stop",
                f"add {token} to eos_token_id in generation_config.json, or to stop_token_ids of "
                "the sampling",
            )


def _identity(row: Demonstration) -> bytes:
    return row.prompt_tokens.tobytes() + b"|" + row.answer_tokens.tobytes()


def _decoded(tokenizer: Any, tokens: Any) -> str:
    return str(tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False))
