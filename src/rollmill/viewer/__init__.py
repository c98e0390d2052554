"""The local web page that shows runs. See ARCHITECTURE.md for what this room holds.

Invariant of the whole room: files of a run are only ever opened for reading, so nothing that
happens here, a crash included, can stop or change a run.
"""
