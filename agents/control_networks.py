"""Networks for continuous control from replay: a policy, and critics that see the action beside the observation."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import orthogonal
from pydantic import PositiveInt

from .networks import ACTIVATIONS, NetworkConfig, Torso, Trunk


class ControlNetworkConfig(NetworkConfig):
    """What policy and critics are made of, each a network of its own.

    Attributes:
      hidden_sizes: dense layers of the policy and of each critic, after the convolutions if any.
      activation: of these layers.
    """

    hidden_sizes: tuple[PositiveInt, ...] = (256, 256)
    activation: Literal["tanh", "relu", "silu", "gelu"] = "relu"


class PolicyNetwork(nn.Module):
    """Parameters of an action from observations.

    Attributes:
      config: of the network.
      torsos: the torso of each observation, by name.
      num_parameters: outputs.
      in_loop: as in `ActorCriticNetwork`.
    """

    config: ControlNetworkConfig
    torsos: tuple[tuple[str, Torso], ...]
    num_parameters: int
    in_loop: bool = False

    @nn.compact
    def __call__(self, observation: dict[str, jax.Array], is_first: jax.Array) -> jax.Array:
        """Parameters float32 `[B, num_parameters]` of observations `[B, ...]`; `is_first` bool `[B]`."""
        x, _ = Trunk(self.config, self.torsos, self.in_loop, name="trunk")(observation, is_first, ())
        # Small at first: actions begin in the middle of their range.
        return nn.Dense(self.num_parameters, kernel_init=orthogonal(0.01), name="head")(x)


class CriticNetwork(nn.Module):
    """The value of an action from observations.

    Vectors, and what convolutions make of images, are joined with the action before the first dense layer.

    Attributes:
      config: of the network.
      torsos: the torso of each observation, by name.
      in_loop: as in `ActorCriticNetwork`.
    """

    config: ControlNetworkConfig
    torsos: tuple[tuple[str, Torso], ...]
    in_loop: bool = False

    @nn.compact
    def __call__(self, observation: dict[str, jax.Array], action: jax.Array) -> jax.Array:
        """Values float32 `[B]` of observations `[B, ...]` and actions `[B, A]`."""
        without_layers = self.config.model_copy(update={"hidden_sizes": ()})
        encoder = Trunk(without_layers, self.torsos, self.in_loop, name="trunk")
        x, _ = encoder(observation, jnp.zeros(action.shape[:1], bool), ())
        x = jnp.concatenate([x, action], axis=-1)
        dtype, activation = jnp.dtype(self.config.dtype), ACTIVATIONS[self.config.activation]
        for size in self.config.hidden_sizes:
            x = activation(nn.Dense(size, dtype=dtype, kernel_init=orthogonal(2**0.5))(x))
        return nn.Dense(1, kernel_init=orthogonal(1.0), name="head")(x.astype(jnp.float32))[..., 0]
