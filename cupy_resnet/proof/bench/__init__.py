"""How fast, beside what: the same network through this package and through PyTorch, taking turns in one run.

`comparison` measures rows (a network, a batch size, a precision), `ladder` single convolutions, `fusion` what fusing
buys, `end_to_end` whole runs from files on disk. Each returns plain data, which is stored as JSON with its raw samples
and the machine it was made on, and which `listings` and `plot` turn into what a person reads.
"""
