"""A policy in a file of its own, for programs that have JAX and NumPy but nothing of this package.

The file holds a function lowered by `jax.export`, with the parameters inside it. It runs on every platform it was
lowered for, and JAX promises to read it for half a year of its releases. Beside it lies an example that uses it.
"""

from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from tianji_jax.config import ConfigError
from tianji_jax.saved_policy import SavedPolicy, load_policy
from tianji_jax.types import PyTree

POLICY = "policy.jax"
EXAMPLE = "example.py"

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""All that JAX lowers to without having them."""

_KEY_TYPE = "threefry2x32"

_EXAMPLE = Template('''\
"""Version $version of the policy of $environment, $mode. Needs: pip install jax flatbuffers"""

from pathlib import Path

import jax
import numpy as np
from jax import export

policy = jax.jit(export.deserialize(bytearray(Path(__file__).with_name("$file").read_bytes())).call)
observation = $observation
is_first = np.ones($batch, bool)  # True where an episode begins
state = $state  # give back what the call before returned; of no account where is_first
key = jax.random.key_data(jax.random.key(0))  # a new one for every call$key_note
action, state = policy(key, observation, is_first, state)
print(action)
''')


def export(
    run: str | Path,
    output: str | Path | None = None,
    *,
    best: bool = False,
    greedy: bool = False,
    batch: int | None = None,
) -> Path:
    """Write a run's policy for use without tianji_jax; returns the folder with `policy.jax` and `example.py`.

    The function in the file is `(key, observation, is_first, state) -> (action, state)`: key uint32 `[2]`, the others
    as `Agent.act` has them with any batch size, the recurrent state as a flat tuple of arrays.

    Args:
      run: folder of a run.
      output: folder to write to, by default `policy-VERSION` (`policy-VERSION-greedy`) in the run's.
      best: the checkpoint with the highest mean return of 100 episodes instead of the newest.
      greedy: the policy's mode instead of samples; the key is then ignored.
      batch: the only batch size, for agents that cannot be written for all.

    Raises:
      ConfigError: there is no such run or checkpoint, the agent cannot be greedy or not be written, or the folder
        holds something already.
    """
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch: got {batch}; it should be 1 or more")
    policy = load_policy(Path(run), best=best)
    if greedy:
        policy.require_greedy()
    mode = "greedy" if greedy else "sampled"
    suffix = "-greedy" if greedy else ""
    folder = Path(run) / f"policy-{policy.version}{suffix}" if output is None else Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--output: {folder} exists already; choose another folder or remove it")
    content = _serialised(_lowered(policy, greedy, batch))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / POLICY).write_bytes(content)
        (folder / EXAMPLE).write_text(_example(policy, mode, batch or 1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: cannot write to {folder}: {error.strerror}") from None
    return folder


def _function(policy: SavedPolicy, greedy: bool) -> Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]:
    agent: Any = policy.agent
    structure = jax.tree.structure(jax.eval_shape(lambda: agent.initial_state(1)))
    constants = jax.tree.map(np.asarray, policy.params)  # of no device

    def act(
        key: jax.Array, observation: PyTree, is_first: jax.Array, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        params, before = jax.tree.map(jnp.asarray, constants), jax.tree.unflatten(structure, state)
        if greedy:
            action, after = agent.act_greedy(params, observation, is_first, before)
        else:
            rng = jax.random.wrap_key_data(key, impl=_KEY_TYPE)
            action, _, after = agent.act(params, rng, observation, is_first, before)
        return action, tuple(jax.tree.leaves(after))

    return act


def _lowered(policy: SavedPolicy, greedy: bool, batch: int | None) -> jax_export.Exported:
    """The function for all platforms, or, where something in it is for one only, for the CPU."""
    size: Any = jax_export.symbolic_shape("batch")[0] if batch is None else batch

    def spec(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *array.shape), array.dtype)

    arguments = (
        jax.ShapeDtypeStruct((2,), np.uint32),
        jax.tree.map(spec, policy.env_spec.observation),
        jax.ShapeDtypeStruct((size,), bool),
        tuple(spec(array) for array in _state(policy)),
    )
    function = jax.jit(_function(policy, greedy))
    # What an agent's code raises where a size is not a number, JAX does not promise.
    try:
        return jax_export.export(function, platforms=PLATFORMS)(*arguments)
    except Exception as first:
        try:
            return jax_export.export(function, platforms=("cpu",))(*arguments)
        except Exception:
            hint = "; --batch N writes it for one batch size" if batch is None else ""
            reason = next(iter(str(first).splitlines()), type(first).__name__)
            raise ConfigError(
                f"agent.name: {policy.config.agent['name']} cannot be exported{hint}: {reason}"
            ) from first


def _state(policy: SavedPolicy) -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of one environment's recurrent state, array by array."""
    state = jax.tree.leaves(jax.eval_shape(lambda: policy.agent.initial_state(1)))
    return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in state]


def _serialised(exported: jax_export.Exported) -> bytes:
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise ConfigError("export needs flatbuffers: pip install 'tianji_jax[export]'") from error


def _example(policy: SavedPolicy, mode: str, batch: int) -> str:
    def zeros(array: Any) -> str:
        return f"np.zeros({(batch, *array.shape)}, {np.dtype(array.dtype).name!r})"

    observation = policy.env_spec.observation
    if isinstance(observation, dict):
        shown = "{" + ", ".join(f"{name!r}: {zeros(spec)}" for name, spec in observation.items()) + "}"
    else:
        shown = zeros(observation)
    state = "".join(f"{zeros(array)}, " for array in _state(policy)).rstrip()
    return _EXAMPLE.substitute(
        version=policy.version,
        environment=policy.env_spec.name,
        mode=mode,
        file=POLICY,
        observation=shown,
        batch=batch,
        state=f"({state})",
        key_note="; ignored, since this policy is greedy" if mode == "greedy" else "",
    )
