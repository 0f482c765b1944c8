"""Networks of the reference agents: a torso per observation, an optional recurrent core, a policy and a value head.

One network serves both acting on one step (`[B, ...]`) and the learner's unroll (`[T, B, ...]`): the number of leading
dimensions is that of `is_first`.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import orthogonal
from pydantic import PositiveInt

from tianji_jax.agent import AgentConfig
from tianji_jax.types import ArraySpec, ContinuousActions, EnvSpec, PyTree

Torso = Literal["mlp", "small_cnn", "nature_cnn", "impala_resnet"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": nn.relu,
    "silu": nn.silu,
    "gelu": nn.gelu,
}
_HIDDEN_SIZES: dict[Torso, tuple[int, ...]] = {
    "mlp": (64, 64),
    "small_cnn": (256,),
    "nature_cnn": (512,),
    "impala_resnet": (256,),
}
_SMALLEST_IMAGE: dict[Torso, int] = {"small_cnn": 1, "nature_cnn": 36, "impala_resnet": 1}
_NATURE_CNN_FROM = 64  # pixels: "auto" takes the small CNN below


class NetworkConfig(AgentConfig):
    """What the network is made of.

    Attributes:
      torso: `auto` takes a CNN for an observation of rank 3 (`nature_cnn` from 64 pixels, `small_cnn` below), for any
        other an MLP over its flattened entries. A named CNN is for the images of a dict of observations; its vectors
        go through an MLP all the same.
      hidden_sizes: dense layers of each torso, after the convolutions if any; by default 64, 64 for the MLP, 512 for
        `nature_cnn`, 256 for the other CNNs.
      activation: of the MLP; the CNNs use relu.
      recurrence: core between torso and heads, reset at each episode's first observation.
      recurrent_size: units of the core.
      shared_torso: policy and value heads on one torso (and core), or each on its own. By default shared where there is
        an image or a core, separate for MLPs.
      dtype: of the computation; parameters and outputs are float32.
    """

    torso: Literal["auto", "mlp", "small_cnn", "nature_cnn", "impala_resnet"] = "auto"
    hidden_sizes: tuple[PositiveInt, ...] | None = None
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    recurrence: Literal["none", "lstm", "gru"] = "none"
    recurrent_size: PositiveInt = 128
    shared_torso: bool | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


def torso_of(config: NetworkConfig, spec: ArraySpec) -> Torso:
    """The torso an observation goes through."""
    if len(spec.shape) != 3:
        return "mlp"
    if config.torso == "auto":
        return "nature_cnn" if min(spec.shape[1:]) >= _NATURE_CNN_FROM else "small_cnn"
    return config.torso


def torsos_of(config: NetworkConfig, observation: dict[str, ArraySpec]) -> tuple[tuple[str, Torso], ...]:
    """The torso of each observation, by name."""
    return tuple((name, torso_of(config, spec)) for name, spec in observation.items())


def shares_torso(config: NetworkConfig, torsos: tuple[tuple[str, Torso], ...]) -> bool:
    """Whether policy and value stand on one torso."""
    if config.shared_torso is not None:
        return config.shared_torso
    return config.recurrence != "none" or any(torso != "mlp" for _, torso in torsos)


def check_fits(config: NetworkConfig, observation: dict[str, ArraySpec]) -> None:
    """Raise `ValueError` where torso and observations do not go together.

    Args:
      config: of the network.
      observation: specs of what the network sees of one environment.
    """
    if not observation:
        raise ValueError("the network sees no observation: the environment has none besides its action mask")
    shapes = ", ".join(f"{name} {spec}" for name, spec in observation.items())
    if config.torso not in ("auto", "mlp") and not any(len(spec.shape) == 3 for spec in observation.values()):
        raise ValueError(
            f"agent.network.torso {config.torso!r} is for images (channels, height, width), not for {shapes}: use 'mlp'"
            " or 'auto'"
        )
    for name, spec in observation.items():
        torso = torso_of(config, spec)
        if torso != "mlp" and min(spec.shape[1:]) < _SMALLEST_IMAGE[torso]:
            raise ValueError(
                f"agent.network.torso {torso!r} needs images (channels, height, width) of at least"
                f" {_SMALLEST_IMAGE[torso]} pixels in height and width, not {name} {spec}: use 'small_cnn' or 'auto'"
            )


def initial_state(config: NetworkConfig, shared_torso: bool, batch_size: int) -> PyTree:
    """Zeros for the recurrent cores: one entry per torso, `[batch_size, recurrent_size]` each; `()` without a core."""
    if config.recurrence == "none":
        return ()
    carry = jnp.zeros((batch_size, config.recurrent_size))
    core = (carry, carry) if config.recurrence == "lstm" else carry
    return (core,) if shared_torso else (core, core)


def named(observation: PyTree) -> dict[str, Any]:
    """Observations by name; one that has none is called `observation`."""
    return observation if isinstance(observation, dict) else {"observation": observation}


def seen(observation: PyTree, specs: dict[str, ArraySpec]) -> dict[str, Any]:
    """Of an environment's observation what a network sees of it, by name; `specs` as `seen_specs` finds them."""
    by_name = named(observation)
    return {name: by_name[name] for name in specs}


def seen_specs(env_spec: EnvSpec, num_actions: int) -> dict[str, ArraySpec]:
    """Specs of what a network sees of an environment, sorted by name: all observations but an action mask.

    Args:
      env_spec: of the environment.
      num_actions: values of all actions together, which a mask has to have.

    Raises:
      ValueError: the action mask is not one for these actions.
    """
    specs = named(env_spec.observation)
    if env_spec.action_mask is not None:
        _check_action_mask(env_spec, num_actions)
    return {name: spec for name, spec in sorted(specs.items()) if name != env_spec.action_mask}


def _check_action_mask(env_spec: EnvSpec, num_parameters: int) -> None:
    specs = named(env_spec.observation)
    if isinstance(env_spec.action, ContinuousActions):
        raise ValueError(f"{env_spec.name}: an action mask is for discrete actions, not for {env_spec.action}")
    mask: ArraySpec | None = specs.get(env_spec.action_mask or "")
    if mask is None or mask.shape != (num_parameters,):
        raise ValueError(
            f"{env_spec.name}: the action mask {env_spec.action_mask!r} must be an observation of shape"
            f" ({num_parameters},), one entry per action value; it is {mask or 'not among the observations'}"
        )


class ActorCriticNetwork(nn.Module):
    """Parameters of the action distribution, value and next recurrent state from observations.

    Attributes:
      config: of the network.
      torsos: the torso of each observation, by name.
      shared_torso: see `NetworkConfig`, decided.
      num_parameters: outputs of the policy head.
      num_shared_parameters: learned numbers appended to them (initially 0).
      in_loop: whether the program runs the network inside a loop; the result is the same, see `Conv`.
    """

    config: NetworkConfig
    torsos: tuple[tuple[str, Torso], ...]
    shared_torso: bool
    num_parameters: int
    num_shared_parameters: int = 0
    in_loop: bool = False

    @nn.compact
    def __call__(
        self, observation: dict[str, jax.Array], is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Run one step or an unroll.

        Args:
          observation: arrays of `[B, ...]` or `[T, B, ...]`; images channel-first.
          is_first: bool `[B]` or `[T, B]`.
          state: as `initial_state` makes it.

        Returns:
          Parameters float32 `[..., num_parameters + num_shared_parameters]`, value float32 `[...]`, next state.
        """
        trunks = ["trunk"] if self.shared_torso else ["policy_trunk", "value_trunk"]
        features, next_state = [], []
        for i, name in enumerate(trunks):
            trunk = Trunk(self.config, self.torsos, self.in_loop, name=name)
            x, core_state = trunk(observation, is_first, state[i] if state else ())
            features.append(x)
            next_state.append(core_state)
        parameters = nn.Dense(self.num_parameters, kernel_init=orthogonal(0.01), name="policy_head")(features[0])
        value = nn.Dense(1, kernel_init=orthogonal(1.0), name="value_head")(features[-1])
        parameters, value = parameters.reshape(*is_first.shape, -1), value.reshape(is_first.shape)
        if self.num_shared_parameters:
            shared = self.param("shared", nn.initializers.zeros, (self.num_shared_parameters,))
            shared = jnp.broadcast_to(shared, (*is_first.shape, self.num_shared_parameters))
            parameters = jnp.concatenate([parameters, shared], axis=-1)
        return parameters, value, tuple(next_state) if state else ()


class QNetwork(nn.Module):
    """Quantiles of the returns of all actions, and the next recurrent state, from observations.

    Attributes:
      config: of the network.
      torsos: the torso of each observation, by name.
      num_actions: how many.
      dueling: a value, and an advantage for each action whose mean over the actions is zero (Wang et al. 2016,
        equation 9), in place of the values themselves; for each quantile.
      quantiles: of the return of each action; a single one is its value.
      in_loop: as in `ActorCriticNetwork`.
    """

    config: NetworkConfig
    torsos: tuple[tuple[str, Torso], ...]
    num_actions: int
    dueling: bool
    quantiles: int = 1
    in_loop: bool = False

    @nn.compact
    def __call__(
        self, observation: dict[str, jax.Array], is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """Run one step or an unroll, as `ActorCriticNetwork`; float32 `[..., num_actions, quantiles]`, next state."""
        trunk = Trunk(self.config, self.torsos, self.in_loop, name="trunk")
        x, core_state = trunk(observation, is_first, state[0] if state else ())
        next_state = (core_state,) if state else ()
        q = nn.Dense(self.num_actions * self.quantiles, kernel_init=orthogonal(1.0), name="action_head")(x)
        q = q.reshape(*is_first.shape, self.num_actions, self.quantiles)
        if not self.dueling:
            return q, next_state
        value = nn.Dense(self.quantiles, kernel_init=orthogonal(1.0), name="value_head")(x)
        value = value.reshape(*is_first.shape, 1, self.quantiles)
        return value + q - jnp.mean(q, axis=-2, keepdims=True), next_state


class Trunk(nn.Module):
    """Torsos of all observations, concatenated, then the recurrent core if there is one.

    Features float32 `[N, n]`, the steps of an unroll one after the other, `N = T * B`: over two leading axes, XLA's
    matrix products take twice the time on a CPU, in the gradients.
    """

    config: NetworkConfig
    torsos: tuple[tuple[str, Torso], ...]
    in_loop: bool

    @nn.compact
    def __call__(
        self, observation: dict[str, jax.Array], is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        features = [self._torso(name, torso, observation[name], is_first.ndim) for name, torso in self.torsos]
        x = jnp.concatenate(features, axis=-1) if len(features) > 1 else features[0]
        if self.config.recurrence != "none":
            x, state = Core(self.config)(x.reshape(*is_first.shape, -1), is_first, state)
            x = x.reshape(-1, x.shape[-1])
        return x.astype(jnp.float32), state

    def _torso(self, name: str, torso: Torso, x: jax.Array, leading: int) -> jax.Array:
        dtype = jnp.dtype(self.config.dtype)
        steps, shape = prod(x.shape[:leading]), x.shape[leading:]
        # Scaled in the computation's dtype: an unroll of images as float32 would be four times its size again.
        x = x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)
        activation = ACTIVATIONS[self.config.activation]
        if torso != "mlp":
            x = x.reshape(steps, *shape).transpose(0, 2, 3, 1)
            x = _CNNS[torso](dtype, self.in_loop)(x)
            activation = nn.relu
        x = x.reshape(steps, -1)
        for size in _HIDDEN_SIZES[torso] if self.config.hidden_sizes is None else self.config.hidden_sizes:
            x = activation(nn.Dense(size, dtype=dtype, kernel_init=orthogonal(2**0.5))(x))
        return x


class Core(nn.Module):
    """An LSTM or GRU over one step `[B, n]` or an unroll `[T, B, n]`, its state reset where `is_first`."""

    config: NetworkConfig

    @nn.compact
    def __call__(self, x: jax.Array, is_first: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        make_cell = nn.OptimizedLSTMCell if self.config.recurrence == "lstm" else nn.GRUCell
        cell = make_cell(self.config.recurrent_size, dtype=jnp.dtype(self.config.dtype), name="cell")

        def step(cell: nn.Module, state: PyTree, inputs: tuple[jax.Array, jax.Array]) -> tuple[PyTree, jax.Array]:
            x, first = inputs
            state = jax.tree.map(lambda s: jnp.where(first[:, None], 0.0, s), state)
            state, x = cell(state, x)
            # The state stays float32 whatever the cell computes in: a scan's carry cannot change its dtype.
            return jax.tree.map(lambda s: s.astype(jnp.float32), state), x

        if x.ndim == 3:
            unroll = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
            state, x = unroll(cell, state, (x, is_first))
        else:
            state, x = step(cell, state, (x, is_first))
        return x, state


class SmallCNN(nn.Module):
    """Two strided convolutions, for images of some 40 pixels on CPUs."""

    dtype: Any
    in_loop: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, kernel, stride in ((16, 5, 3), (32, 3, 2)):
            x = nn.relu(Conv(features, kernel, stride, "SAME", self.dtype, self.in_loop)(x))
        return x


class NatureCNN(nn.Module):
    """The convolutions of Mnih et al. 2015 (DQN)."""

    dtype: Any
    in_loop: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(Conv(features, kernel, stride, "VALID", self.dtype, self.in_loop)(x))
        return x


class ImpalaResNet(nn.Module):
    """The large architecture of Espeholt et al. 2018 (IMPALA), figure 3, without its core."""

    dtype: Any
    in_loop: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32, 32):
            conv = partial(Conv, features, 3, 1, "SAME", self.dtype, self.in_loop)
            x = conv()(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                y = conv()(nn.relu(x))
                x = x + conv()(nn.relu(y))
        return nn.relu(x)


class Conv(nn.Module):
    """A convolution with orthogonal kernel; parameters as `nn.Conv` has them, images channels-last.

    Inside a loop on CPUs, such as PPO's over minibatches, it is written as patches times matrix: XLA's own convolution
    is 10 to 20 times slower there than outside (`scripts/bench_convolution.py`).
    """

    features: int
    kernel: int
    stride: int
    padding: str
    dtype: Any
    in_loop: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.kernel, self.kernel, x.shape[-1], self.features)
        kernel = self.param("kernel", orthogonal(2**0.5), shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
        if self.in_loop:
            return jax.lax.platform_dependent(x, kernel, cpu=self._patches, default=self._native) + bias
        return self._native(x, kernel) + bias

    def _native(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, strides, self.padding, dimension_numbers=layout)

    def _patches(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        size, stride = self.kernel, self.stride
        padding = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), self.padding)
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
        height, width = ((n - size) // stride * stride + 1 for n in x.shape[1:3])
        columns = [x[:, i : i + height : stride, j : j + width : stride] for i in range(size) for j in range(size)]
        return jnp.concatenate(columns, axis=-1) @ kernel.reshape(-1, self.features)


_CNNS: dict[Torso, Any] = {"small_cnn": SmallCNN, "nature_cnn": NatureCNN, "impala_resnet": ImpalaResNet}
