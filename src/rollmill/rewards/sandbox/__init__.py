"""Running programs that nobody has read: answers to coding tasks.

`inside/` is the trusted program inside: alone (it imports nothing else of ours, so that it starts
quickly and shows the program nothing), it isolates itself and runs one forked process per test.
`run.py` starts it and reads what comes back. Expected outputs never go inside.

What it protects from: using up memory, processors, processes, disk or output; the network; reading
or writing files of this machine other than Python's own (read-only); reading the environment.
What it does not protect from: faults of the kernel; timing; a program that knows its tests are
`assert` lines and cheats them from inside their own process.
"""
