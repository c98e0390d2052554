"""Checks of the model, the tokenizer, the data and the user's functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rollmill.checks.demonstrations import load_recorded
from rollmill.checks.finding import Finding, error, from_error, ok, warning
from rollmill.config import Config, DatasetConfig
from rollmill.data import PromptRow, load_dataset
from rollmill.errors import RollmillError
from rollmill.filters import DynamicFilter, load_ranking
from rollmill.loop.policy import Policy
from rollmill.loop.ready import check_judged, check_other_models, check_router
from rollmill.rewards.check import CheckReport, check_rewards
from rollmill.rewards.registry import check_names, reward_names
from rollmill.rollout.hooks import load_generate, load_hooks
from rollmill.trainer.algorithm import find_algorithm

MAX_GRADED_ROWS = 64


@dataclass(frozen=True)
class LoadedData:
    """Training and evaluation rows, as far as they could be read."""

    train: Sequence[PromptRow]
    evals: dict[str, list[PromptRow]]


def check_tokenizer(policy: Policy, config: Config) -> Iterator[Finding]:
    """Vocabulary, end of sequence, chat template."""
    from transformers import AutoConfig

    tokenizer = policy.tokenizer
    model = AutoConfig.from_pretrained(policy.folder, local_files_only=True)
    model = model.get_text_config()
    size, rows = len(tokenizer), int(model.vocab_size)
    if size > rows:
        yield error(
            "tokenizer",
            f"it has {size} tokens, the model embeds {rows}: it belongs to another model",
            "use the model's own tokenizer",
        )
    else:
        yield ok("tokenizer", f"{size} tokens, embeddings for {rows}")
    if tokenizer.eos_token_id is None:
        yield error(
            "tokenizer",
            "it has no end-of-sequence token: no answer ever ends by itself",
            "set eos_token in tokenizer_config.json, or rollout.sampling.stop",
        )
    if tokenizer.chat_template is None and config.data.apply_chat_template:
        yield error(
            "data.apply_chat_template",
            "the tokenizer has no chat template",
            "set data.apply_chat_template to false for a base model",
        )
    elif tokenizer.chat_template is not None:
        yield from _prefix_stability(tokenizer)


def _prefix_stability(tokenizer: Any) -> Iterator[Finding]:
    """Whether a rendered conversation begins with its rendered beginning (multi-turn needs it)."""
    turns = [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
    ]

    def render(count: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(turns[:count], tokenize=False, **options))

    if render(3).startswith(render(2)) and render(2).startswith(
        render(1, add_generation_prompt=True)
    ):
        yield ok("chat template", "each turn is appended to the text before it")
    else:
        yield warning(
            "chat template",
            "a later turn changes the text of earlier ones (or of the generation prompt)",
            "single-turn tasks are fine; multi-turn functions must append token ids themselves",
        )


def load_all_data(
    config: Config, policy: Policy, base_dir: Path
) -> tuple[LoadedData, list[Finding]]:
    """Read every data set; problems become findings."""
    findings: list[Finding] = []

    def read(name: str, dataset: DatasetConfig) -> list[PromptRow]:
        try:
            loaded = load_dataset(
                dataset,
                tokenizer=policy.tokenizer,
                context_length=policy.context_length,
                base_dir=base_dir,
                seed=config.run.seed,
            )
        except RollmillError as problem:
            findings.append(from_error(name, problem))
            return []
        left_out = f", {loaded.num_bad} bad, {loaded.num_too_long} too long" * bool(
            loaded.num_bad or loaded.num_too_long
        )
        findings.append(ok(name, f"{len(loaded.rows)} prompts{left_out}"))
        share = (loaded.num_bad + loaded.num_too_long) / max(
            1, len(loaded.rows) + loaded.num_bad + loaded.num_too_long
        )
        if share > 0.05:
            findings.append(
                warning(
                    name,
                    f"{share:.0%} of the rows are left out",
                    "mend the rows, or raise data.max_prompt_tokens or model.context_length",
                )
            )
        return list(loaded.rows)

    train: Sequence[PromptRow]
    if config.data.sft is not None:
        train = load_recorded(config, policy, base_dir, findings)
    else:
        train = read("data", config.data)
    evals = {d.name: read(f"eval {d.name}", d.data) for d in config.eval.datasets}
    return LoadedData(train, evals), findings


def check_data(config: Config, policy: Policy, data: LoadedData) -> Iterator[Finding]:
    """Amounts, duplicates, overlap of training and evaluation, room for answers."""
    if not data.train:
        return
    prompts = {row.prompt_tokens.tobytes() for row in data.train}
    if len(prompts) < len(data.train):
        yield warning(
            "data",
            f"{len(data.train) - len(prompts)} prompts occur more than once",
            "remove the copies unless they are meant",
        )
    if len(data.train) < config.rollout.batch_size:
        yield warning(
            "data",
            f"{len(data.train)} prompts fill less than one batch of {config.rollout.batch_size}: "
            "prompts repeat within a step",
            "add prompts or make rollout.batch_size smaller",
        )
    for name, rows in data.evals.items():
        shared = sum(row.prompt_tokens.tobytes() in prompts for row in rows)
        if shared:
            yield warning(
                f"eval {name}",
                f"{shared} of {len(rows)} prompts are in the training data too",
                "take them out of the training data: a score on them means nothing",
            )
    yield from _room(config, policy, data.train)
    unlabelled = sum(row.label is None for row in data.train)
    if unlabelled and config.data.label_key is not None and config.reward.type != "ifbench":
        yield warning(
            "data",
            f"{unlabelled} of {len(data.train)} rows have no label",
            "fill data.label_key, or set it to null when the reward needs none",
        )


def _room(config: Config, policy: Policy, rows: Sequence[PromptRow]) -> Iterator[Finding]:
    longest = max(len(row.prompt_tokens) for row in rows)
    wanted = config.rollout.sampling.max_new_tokens
    cut = sum(len(row.prompt_tokens) + wanted > policy.context_length for row in rows)
    text = (
        f"longest prompt {longest} tokens, answers up to {wanted}, context {policy.context_length}"
    )
    if cut:
        yield warning(
            "context",
            f"{text}: {cut} of {len(rows)} prompts leave less room than max_new_tokens",
            "lower rollout.sampling.max_new_tokens or raise model.context_length",
        )
    else:
        yield ok("context", text)


def check_functions(config: Config, base_dir: Path) -> Iterator[Finding]:
    """The user's hooks and filters load and have the right parameters."""
    hooks = load_hooks(config.rollout.hooks, base_dir)
    key = config.reward.reward_key
    DynamicFilter(config.rollout.filters, reward_key=key, base_dir=base_dir)
    load_ranking(config.rollout.filters.over_sampling, reward_key=key, base_dir=base_dir)
    for dataset in config.eval.datasets:
        load_generate(
            dataset.generate,
            base_dir=base_dir,
            name=f"eval.datasets.{dataset.name}.generate",
            default=hooks.generate,
        )
    check_names(config.reward)
    check_other_models(config)
    check_router(config)
    find_algorithm(config.trainer.algorithm, base_dir=base_dir, opd=config.opd)
    yield ok("functions", "hooks, filters and the algorithm's parts load and take what they get")


def check_reward(config: Config, data: LoadedData, base_dir: Path) -> Iterator[Finding]:
    """Gold answers of some training rows score full marks, corrupted ones do not."""
    if not data.train or config.rollout.is_replay:  # nobody judges recorded answers
        return
    check_judged(config, data.train)
    is_run_wide = bool(reward_names(config.reward))
    judged = (r for r in data.train if is_run_wide or r.metadata.get("reward_type") is not None)
    rows = list(islice(judged, MAX_GRADED_ROWS))
    if not rows:  # a teacher or a function of the user's is the signal
        return
    report = check_rewards(rows, config.reward, base_dir=base_dir, seed=config.run.seed)
    yield from _reward_findings(report)


def _reward_findings(report: CheckReport) -> Iterator[Finding]:
    for failure in report.gold_failures[:3]:
        yield error(
            "reward",
            f"{failure.row_id}: the label {failure.label!r} as an answer gets "
            f"{failure.outcome.reward} ({failure.outcome.kind.value}: {failure.outcome.detail})",
            "mend the label or choose another reward.type; `rollmill check rewards` lists all rows",
        )
    for passed in report.corrupted_passes[:3]:
        yield warning(
            "reward",
            f"{passed.row_id}: the wrong answer {passed.response[:80]!r} gets full marks",
            "choose a stricter reward",
        )
    for reason, count in report.unchecked.items():
        yield ok("reward", f"{count} rows not graded: {reason}")
    if report.is_fine and report.num_gold:
        yield ok(
            "reward",
            f"{report.num_gold} gold answers score full marks, "
            f"{report.num_corrupted} corrupted ones do not",
        )
