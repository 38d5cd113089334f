"""The sections of `benchmarks.gpu`: each module has `measure(machine, rows)`, which runs in a process of its own."""
