"""A configuration as the plan sees it: the schedule, and what engines and trainer share."""

from __future__ import annotations

import os
from dataclasses import replace

from rollmill.config import Config
from rollmill.errors import ConfigError
from rollmill.plan.schedule import Schedule

BOUNDS = (1, 2, 4)
"""Staleness bounds that a plan compares."""
ENGINE_FACTORS = (0.5, 2.0, 4.0)


def schedule_of(config: Config) -> Schedule:
    """What the configuration runs, as far as time is concerned.

    Raises:
        ConfigError: nothing is generated in it.
    """
    rollout, engine = config.rollout, config.engine
    if rollout.is_replay:
        raise ConfigError(
            "there is nothing to plan: answers are recorded, no engine writes them",
            where="rollout.source",
            expected="generate",
            found=rollout.source,
            fix="train a few steps: time/step_s in their metrics is what there is to know",
        )
    num_engines = (len(engine.urls) or engine.num_engines) - config.eval.num_engines
    places = engine.embedded.max_running_requests
    if engine.urls:  # their own limits are not known: ours, shared out
        places = max(1, engine.max_concurrent_requests // num_engines)
    return Schedule(
        batch_size=rollout.batch_size,
        num_answers=rollout.n_samples_per_prompt,
        max_new_tokens=rollout.sampling.max_new_tokens,
        submit_size=rollout.submit_size,
        is_ranked=rollout.filters.over_sampling is not None,
        is_partial=rollout.partial_rollout,
        max_staleness=rollout.max_staleness if rollout.asynchronous else None,
        num_engines=num_engines,
        places=places,
        max_requests=engine.max_concurrent_requests,
        num_graders=config.reward.num_workers,
    )


def alternatives(schedule: Schedule) -> dict[str, Schedule]:
    """The schedule and others to compare it with, by name: staleness bounds, numbers of engines."""
    found = {name_of(schedule): schedule}
    synchronous = replace(schedule, max_staleness=None)
    found.setdefault(name_of(synchronous), synchronous)
    for bound in BOUNDS:
        other = replace(
            schedule, max_staleness=bound, submit_size=schedule.batch_size, is_ranked=False
        )
        found.setdefault(name_of(other), other)
    for factor in ENGINE_FACTORS:
        count = round(schedule.num_engines * factor)
        if count >= 1:
            name = f"{count} engine{'s' * (count > 1)}"
            more = max(schedule.max_requests, schedule.places * count)
            found[name] = replace(schedule, num_engines=count, max_requests=more)
    return found


def name_of(schedule: Schedule) -> str:
    """How the table calls a schedule."""
    if schedule.max_staleness is None:
        return "synchronous"
    return f"staleness {schedule.max_staleness}"


def contention_of(config: Config) -> float:
    """How many times as long engines and trainer take while both work.

    Threads asked for, over the cores there are; 1 for engines or a trainer with hardware of their
    own.
    """
    if config.engine.urls or "cuda" in (config.trainer.device, config.engine.embedded.device):
        return 1.0
    cores = len(os.sched_getaffinity(0))
    num_engines = config.engine.num_engines - config.eval.num_engines
    engines = num_engines * (config.engine.embedded.num_threads or cores)
    per_rank = config.trainer.num_threads or max(cores // config.trainer.num_ranks, 1)
    return max(1.0, (engines + config.trainer.num_ranks * per_rank) / cores)
