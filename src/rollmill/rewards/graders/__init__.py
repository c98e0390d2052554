"""The built-in reward types: one file each, pure functions of the answer and the data row."""
