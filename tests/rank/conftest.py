"""Runs rank code with the environment that a launch gives its ranks."""

import os

# torchrun gives ranks one thread; beside other workers, more threads than cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
