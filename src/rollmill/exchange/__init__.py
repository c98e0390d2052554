"""What the trainer and the embedded engine must agree on about weights, byte for byte.

Checksums, deltas, buckets and process groups. Both sides import it, so they cannot disagree; it
imports nothing of ours but the errors.
"""
