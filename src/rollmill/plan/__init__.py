"""`rollmill plan`: how long a step takes and what waits for what, simulated before it is run."""
