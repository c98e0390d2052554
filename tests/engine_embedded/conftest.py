from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedded_helpers import SMALL, make_model, save_tokenizer
from transformers import LlamaConfig

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model(LlamaConfig(**SMALL)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    make_model(LlamaConfig(**SMALL), seed=1).save_pretrained(folder)
    return folder
