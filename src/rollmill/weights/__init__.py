"""Moving new weights from the trainer to the engines; `disk.py` is the way through a folder."""
