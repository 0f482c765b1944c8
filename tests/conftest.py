"""Settings of JAX for all tests and the processes they start; they count only where JAX is imported after them."""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest

# Four virtual CPU devices; and programs that run a few times are not worth LLVM's best: it took 30 % of the time of the
# tests that compile most (`test_parallel`, `agents/test_impala`).
_FLAGS = {"--xla_force_host_platform_device_count": "4", "--xla_llvm_disable_expensive_passes": "true"}

for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()

# Most tests train something, many the same: each program is compiled once, also by processes of their own.
_CACHE = {
    "JAX_COMPILATION_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"tianji-tests-{os.getuid()}"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.update({name: value for name, value in _CACHE.items() if name not in os.environ})


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Programs of a module are dropped with it: a process that holds some thousands runs out of maps."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()
