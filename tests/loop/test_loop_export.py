"""`rollmill export` needs the run folder and the model, and nothing that training needs besides."""

from pathlib import Path

from support.tiny_run import rollmill, write_tiny_run

ONES = """
import numpy as np

def ones(inputs, config):
    return [np.ones(len(mask)) for mask in inputs.masks]
"""


def test_an_export_does_without_the_runs_own_functions(tmp_path: Path) -> None:
    config = write_tiny_run(
        tmp_path,
        run__num_steps=1,
        rollout__batch_size=2,
        rollout__n_samples_per_prompt=2,
        eval__datasets=[],
        trainer__algorithm__advantage="mine.py:ones",
    )
    (tmp_path / "mine.py").write_text(ONES)
    trained = rollmill("train", config)
    assert trained.returncode == 0, trained.stderr
    (tmp_path / "mine.py").unlink()

    exported = rollmill("export", tmp_path / "run", tmp_path / "model_of_mine")

    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model_of_mine" / "model.safetensors").exists()
