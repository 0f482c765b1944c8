"""Asynchronous deep reinforcement learning on JAX.

import tianji_jax

result = tianji_jax.train(tianji_jax.load("configs/cartpole_ppo.yaml", ["run.seed=2"]))
print(result.episode_return)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tianji_jax.config import Config, ConfigError, load, validate
    from tianji_jax.evaluation import Evaluation, evaluate
    from tianji_jax.launch import Result, train
    from tianji_jax.worker import WorkerError

__all__ = ["Config", "ConfigError", "Evaluation", "Result", "WorkerError", "evaluate", "load", "train", "validate"]

# No name here may be a module's too: importing the module would put it in the name's place.
_HOMES = {
    "Evaluation": "evaluation",
    "evaluate": "evaluation",
    "Result": "launch",
    "train": "launch",
    "WorkerError": "worker",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that importing one module of the package loads no more than it needs.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return __all__
