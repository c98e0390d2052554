"""Inference engines: one typed client, a pool of engines, their processes and their health.

Start reading at `pool.py` (what the rest of the system uses), then `dispatch.py` (requests),
`control.py` (every engine at once), `member.py` (the life of one engine), `client.py` (the wire).
"""
