"""Compiled programs are shared by the processes that the tests start."""

import os
import tempfile

_CACHE = tempfile.TemporaryDirectory(prefix="rlds_jax_tests_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _CACHE.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
