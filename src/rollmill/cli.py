"""The `rollmill` command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollmill import __version__
from rollmill.cli_process import (
    collect_garbage_seldom,
    fail,
    from_system,
    log_to,
    quiet_libraries,
    run_until_signal,
)
from rollmill.errors import RollmillError
from rollmill.plan.commands import plan
from rollmill.viewer.commands import view

app = typer.Typer(
    name="rollmill",
    help="Train language models with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

distill_app = typer.Typer(
    help="Distillation from recorded answers.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(distill_app, name="distill")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.field=value …]", help="Changes to the YAML file."),
]
WITH_OVERRIDES = {"ignore_unknown_options": True}
"""`--lr=1` reaches the overrides, whose error says how settings are written."""
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]


def main() -> None:
    """The entry point: errors of ours end as text, not as a traceback."""
    try:
        app()
    except RollmillError as error:
        logging.getLogger(__name__).info("this ended the command: %s", error)
        fail(error)
    except BrokenPipeError:  # whoever read our output (`| head`) has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        refusal = from_system(error)
        if refusal is None:
            raise
        logging.getLogger(__name__).info("this ended the command", exc_info=error)
        fail(refusal)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(context_settings=WITH_OVERRIDES)
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train as CONFIG says; goes on from the run folder's newest checkpoint."""
    from rollmill.config.load import load_config
    from rollmill.loop.train import train as run_training
    from rollmill.telemetry.console import RunView

    quiet_libraries()
    settings = load_config(config, overrides or [])
    log_to(settings.run.dir / "logs" / "driver.log")
    collect_garbage_seldom()
    with RunView(is_on=settings.telemetry.console, num_steps=settings.run.num_steps) as view:
        stop = asyncio.Event()
        result = run_until_signal(
            run_training(settings, base_dir=config.resolve().parent, view=view, stop=stop), stop
        )
    steps = f"{result.step} of {settings.run.num_steps} steps"
    typer.echo(f"\n{'finished' if result.is_finished else 'stopped and saved'}: {steps}")
    typer.echo(f"run folder: {settings.run.dir}")
    typer.echo("  metrics.jsonl         one line per step and evaluation")
    typer.echo("  samples/, eval/       every answer with its log-probs and reward (Parquet)")
    typer.echo("try next:")
    typer.echo(
        f"  rollmill view {settings.run.dir}    every figure and every answer on a local page"
    )
    typer.echo(f"  rollmill inspect {settings.run.dir}    where every prompt went")
    typer.echo(f"  rollmill export {settings.run.dir} my-model    a Hugging Face model folder")
    if not result.is_finished:
        typer.echo(f"  rollmill train {config}    goes on from step {result.step}")


@app.command(context_settings=WITH_OVERRIDES)
def rollout(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write, a new one.")] = Path(
        "rollouts"
    ),
    batches: Annotated[int, typer.Option(help="Batches of rollout.batch_size prompts.", min=1)] = 1,
) -> None:
    """Generate and judge answers without training: CONFIG's model or its newest checkpoint."""
    from rollmill.config.load import load_config
    from rollmill.loop.rollout import collect
    from rollmill.telemetry.console import RunView

    quiet_libraries()
    settings = load_config(config, overrides or [])
    collect_garbage_seldom()
    with RunView(is_on=True, num_steps=batches) as view:
        done = run_until_signal(
            collect(
                settings, base_dir=config.resolve().parent, out=out, num_batches=batches, view=view
            )
        )
    typer.echo(
        f"{done.num_groups} groups by weights of version {done.version}, mean reward "
        f"{done.mean_reward:.3f}; {done.num_dropped} rejected or failed"
    )
    typer.echo(f"answers: {out}/samples/; look at them: rollmill view {out}")


@app.command(name="eval", context_settings=WITH_OVERRIDES)
def evaluate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Evaluate CONFIG's model (or the run's newest checkpoint) on its evaluation sets."""
    from rollmill.config.load import load_config
    from rollmill.loop.evaluate import evaluate as run_evaluation
    from rollmill.telemetry.console import RunView

    quiet_libraries()
    settings = load_config(config, overrides or [])
    with RunView(is_on=True, num_steps=settings.run.num_steps) as view:
        run_until_signal(run_evaluation(settings, base_dir=config.resolve().parent, view=view))


@app.command(context_settings=WITH_OVERRIDES)
def check(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[rewards] CONFIG [section.field=value …]", help="What to check."),
    ],
    live: Annotated[
        bool, typer.Option(help="Also start engines and trainer and compare their log-probs.")
    ] = True,
) -> None:
    """Find what is wrong with CONFIG before it costs anything.

    `check rewards CONFIG` grades all labels of the training data as answers, and wrong answers.
    """
    quiet_libraries()
    if arguments[0] == "rewards":
        raise typer.Exit(_check_rewards(arguments[1:]))
    from rich.console import Console

    from rollmill.checks.report import check_all, show

    findings = check_all(Path(arguments[0]), arguments[1:], is_live=live)
    if not show(findings, Console(highlight=False, soft_wrap=True)):
        raise typer.Exit(1)


def _check_rewards(arguments: list[str]) -> int:
    """Grade every label of the training data as an answer, and wrong answers too."""
    from rollmill.config.load import load_config
    from rollmill.data import load_rows
    from rollmill.errors import ConfigError
    from rollmill.loop.policy import open_policy
    from rollmill.rewards.commands import check_rewards

    if not arguments:
        raise ConfigError(
            "check rewards needs a configuration file",
            expected="CONFIG",
            fix="give it: rollmill check rewards mine.yaml",
        )
    path = Path(arguments[0])
    settings = load_config(path, arguments[1:])
    base_dir = path.resolve().parent
    if settings.rollout.is_replay:
        raise ConfigError(
            "there is nothing to check: nobody judges recorded answers",
            where="rollout.source",
            expected="generate",
            found="replay",
            fix="leave out `rewards`: `rollmill check` looks at the answers themselves",
        )
    policy = open_policy(settings)
    rows = load_rows(
        settings.data,
        tokenizer=policy.tokenizer,
        context_length=policy.context_length,
        base_dir=base_dir,
        seed=settings.run.seed,
    )
    return check_rewards(rows, settings.reward, base_dir=base_dir, seed=settings.run.seed)


@app.command()
def grade(
    file: Annotated[Path, typer.Argument(help="JSONL rows {type, response, label, …metadata}.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; else standard output.")
    ] = None,
    reward_type: Annotated[
        str | None, typer.Option("--type", "-t", help="Reward of rows without a type.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Your reward for rows without a type: file.py:function.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Time limit of one answer, seconds.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of the random reward.")] = 0,
) -> None:
    """Grade FILE; one JSON line {outcome, reward, extracted, detail, seconds} per answer."""
    from rollmill.rewards.commands import grade as run_grading

    run_grading(file, out, reward_type, function, workers, timeout, seed)


@app.command(name="config")
def show_config(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As tables, one per section (docs/configuration.md).")
    ] = False,
) -> None:
    """Print every field of the configuration: default, type, meaning."""
    from rollmill.config.describe import describe_config
    from rollmill.config.reference import config_reference

    typer.echo(config_reference().rstrip() if markdown else describe_config())


@app.command(context_settings=WITH_OVERRIDES)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or pypi:NAME.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 30000,
    context_length: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer; default: the model's.")
    ] = None,
) -> None:
    """Serve MODEL with the embedded engine: SGLang's API and OpenAI's.

    Settings are those of `engine.embedded`, for example `dtype=bfloat16 num_threads=2`.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    from rollmill.config.load import load_embedded
    from rollmill.engine.embedded.server import exit_now
    from rollmill.engine.embedded.server import serve as run_engine
    from rollmill.engine.open_files import raise_limit
    from rollmill.models import resolve_model

    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    raise_limit()
    settings = load_embedded(overrides or [])
    run_engine(
        str(resolve_model(model)),
        host=host,
        port=port,
        config=settings,
        context_length=context_length,
    )
    exit_now(0)


app.command()(view)
app.command(context_settings=WITH_OVERRIDES)(plan)


@app.command()
def inspect(
    run: RunPath,
    group: Annotated[
        int | None, typer.Option(help="Show the history of one group and its samples.")
    ] = None,
) -> None:
    """Show the books of a run: where every prompt is; or the history of one group."""
    from rollmill.loop.inspect import show_group, show_run

    if group is None:
        show_run(run)
    else:
        show_group(run, group)


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write the newest checkpoint of RUN as a Hugging Face model folder."""
    from rollmill.loop.export import export_run

    quiet_libraries()
    folder = export_run(run, out, dtype=dtype)
    typer.echo(f"wrote {folder}")


@app.command(context_settings=WITH_OVERRIDES)
def replay(
    run: RunPath,
    step: Annotated[int, typer.Argument(metavar="STEP", help="The recorded step.", min=1)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[trainer.field=value …]", help="What to do differently."),
    ] = None,
) -> None:
    """Take a recorded STEP of RUN again with other trainer settings and show what changes.

    Needs no engine. `rollout.filters.*` and `reward.reward_key` can be changed too.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rollmill.loop.replay import replay_run

    quiet_libraries()
    replay_run(run, step, overrides or [])


@distill_app.command(name="prepare", context_settings=WITH_OVERRIDES)
def distill_prepare(config: ConfigPath, overrides: Overrides = None) -> None:
    """Record the student's answers with the teacher's view of them, for `opd.mode: offline`.

    Answers the prompts of `data` with the model of CONFIG, scores them with `opd.teacher` and with
    the student itself, and writes them to `opd.data`. Goes on where it was stopped.
    """
    from rollmill.config.load import load_config
    from rollmill.distill.view import PrepareView
    from rollmill.loop.distill import prepare_answers

    quiet_libraries()
    settings = load_config(config, overrides or [])
    with PrepareView() as view:
        manifest = run_until_signal(
            prepare_answers(settings, base_dir=config.resolve().parent, on_progress=view.show)
        )
    typer.echo(f"wrote {len(manifest.shards)} shards to {settings.opd.data}")
    for phase, seconds in manifest.seconds.items():
        typer.echo(f"  {phase:<9} {seconds:8.1f} s")
    typer.echo(f"  {manifest.generated_tokens} tokens generated and scored")
    typer.echo(f"next: rollmill train {config} with opd.mode: offline")


if __name__ == "__main__":
    main()
