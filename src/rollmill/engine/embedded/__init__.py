"""The built-in inference engine: continuous batching over transformers' own model code.

It is a process of its own that speaks SGLang's HTTP API, so that a driver cannot tell the two
apart. `python -m rollmill.engine.embedded MODEL` starts it; `server.serve` is the importable
form. Nothing here imports torch until an engine is really built.

The parts, from the wire inwards: `server` (HTTP) → `engine` (the thread that owns the model) →
`scheduler` (what to compute next; pure) → `model` and `kv` and `attention` (computing it) →
`sampler` (choosing tokens).
"""
