"""Prompts: reading data sets, rendering prompts to tokens, and handing them out in groups.

Importing this package is cheap; pyarrow and transformers are loaded when first needed.
"""

from rollmill.data.loading import Dataset, load_dataset, load_rows
from rollmill.data.opening import open_source
from rollmill.data.prompts import PromptRow
from rollmill.data.source import BufferPolicy, DataSource, PromptSource
from rollmill.data.template import load_tokenizer

__all__ = [
    "BufferPolicy",
    "DataSource",
    "Dataset",
    "PromptRow",
    "PromptSource",
    "load_dataset",
    "load_rows",
    "load_tokenizer",
    "open_source",
]
