"""Starting worker processes and calling them: this machine's now, others' by the same interface."""
