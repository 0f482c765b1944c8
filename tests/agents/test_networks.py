import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from tianji_jax.agents import networks
from tianji_jax.agents.networks import ActorCriticNetwork, NetworkConfig
from tianji_jax.types import ArraySpec

B = 3
VECTOR, SMALL, LARGE = (ArraySpec((5,), np.float32), ArraySpec((3, 40, 44), np.uint8), ArraySpec((4, 84, 84), np.uint8))


def build(config, **specs):
    networks.check_fits(config, specs)
    torsos = tuple((name, networks.torso_of(config, spec)) for name, spec in specs.items())
    shared = networks.shares_torso(config, torsos)
    network = ActorCriticNetwork(config, torsos, shared, num_parameters=6, num_shared_parameters=2)
    return network, networks.initial_state(config, shared, B)


def run(network, state, seed=0, **specs):
    rng = np.random.default_rng(seed)
    observation = {}
    for name, spec in specs.items():
        scale = 255 if spec.dtype == np.uint8 else 1
        observation[name] = (scale * rng.random((B, *spec.shape))).astype(spec.dtype)
    is_first = jnp.zeros(B, bool)
    params = jax.jit(network.init)(jax.random.key(0), observation, is_first, state)
    return params, observation, jax.jit(network.apply)(params, observation, is_first, state)


@pytest.mark.parametrize(
    ("torso", "spec", "recurrence", "dtype"),
    [
        ("auto", VECTOR, "none", "float32"),
        ("auto", VECTOR, "lstm", "bfloat16"),
        ("auto", VECTOR, "gru", "float32"),
        ("auto", VECTOR, "gru", "bfloat16"),
        ("mlp", SMALL, "lstm", "float32"),
        ("small_cnn", SMALL, "gru", "float32"),
        ("nature_cnn", SMALL, "none", "bfloat16"),
        ("nature_cnn", SMALL, "lstm", "float32"),
        ("impala_resnet", SMALL, "none", "float32"),
        ("impala_resnet", SMALL, "lstm", "bfloat16"),
    ],
)
def test_every_torso_has_float32_parameters_and_outputs(torso, spec, recurrence, dtype):
    config = NetworkConfig(torso=torso, recurrence=recurrence, recurrent_size=8, dtype=dtype, hidden_sizes=(16,))
    network, state = build(config, x=spec)
    params, _, (parameters, value, next_state) = run(network, state, x=spec)
    assert parameters.shape == (B, 8)
    assert value.shape == (B,)
    assert jax.tree.structure(next_state) == jax.tree.structure(state)
    for array in jax.tree.leaves((params, parameters, value, next_state)):
        assert array.dtype == jnp.float32
        assert np.isfinite(array).all()
    assert np.std(value) > 0


@pytest.mark.parametrize("recurrence", ["none", "lstm", "gru"])
def test_an_unroll_is_multiplied_as_one_long_batch(recurrence):
    """Over two leading axes XLA's matrix products take twice the time on a CPU."""
    config = NetworkConfig(recurrence=recurrence, recurrent_size=8, hidden_sizes=(16,))
    network, state = build(config, x=VECTOR)
    observation, is_first = {"x": jnp.ones((4, B, *VECTOR.shape))}, jnp.zeros((4, B), bool)
    params = network.init(jax.random.key(0), observation, is_first, state)

    def total(params):
        return sum(jnp.sum(x) for x in network.apply(params, observation, is_first, state)[:2])

    products = [line for line in str(jax.make_jaxpr(jax.grad(total))(params)).split("\n") if "dot_general" in line]
    assert len(products) >= 8
    results = [x for line in products for x in re.findall(r"f32\[([\d,]+)\]", line)]
    assert all(x.count(",") == 1 for x in results)


def test_auto_picks_by_rank_and_size():
    config = NetworkConfig()
    picked = [networks.torso_of(config, spec) for spec in (VECTOR, SMALL, LARGE, ArraySpec((3, 3), np.float32))]
    assert picked == ["mlp", "small_cnn", "nature_cnn", "mlp"]


def test_every_entry_of_a_dict_reaches_the_outputs():
    config = NetworkConfig(hidden_sizes=(16,))
    network, state = build(config, image=SMALL, vector=VECTOR)
    params, observation, (before, _, _) = run(network, state, image=SMALL, vector=VECTOR)
    for name in ("image", "vector"):
        changed = {**observation, name: np.zeros_like(observation[name])}
        after, _, _ = network.apply(params, changed, jnp.zeros(B, bool), state)
        assert not np.allclose(after, before, atol=1e-6)


def test_a_named_cnn_leaves_vectors_to_an_mlp():
    config = NetworkConfig(torso="impala_resnet", hidden_sizes=(8,))
    network, _ = build(config, image=SMALL, vector=VECTOR)
    assert dict(network.torsos) == {"image": "impala_resnet", "vector": "mlp"}


def test_pixels_are_scaled_and_channels_come_first():
    config = NetworkConfig(torso="nature_cnn", hidden_sizes=(8,))
    network, state = build(config, x=LARGE)
    params, _, _ = run(network, state, x=LARGE)
    assert params["params"]["trunk"]["NatureCNN_0"]["Conv_0"]["kernel"].shape == (8, 8, 4, 32)
    assert params["params"]["trunk"]["Dense_0"]["kernel"].shape == (7 * 7 * 64, 8)
    image = np.full((B, *LARGE.shape), 255, np.uint8)
    first = jnp.zeros(B, bool)
    whole, _, _ = network.apply(params, {"x": image}, first, state)
    ones, _, _ = network.apply(params, {"x": np.ones(image.shape, np.float32)}, first, state)
    np.testing.assert_allclose(whole, ones, atol=1e-6)


def test_initialisation_is_orthogonal_with_a_nearly_uniform_policy():
    network, state = build(NetworkConfig(hidden_sizes=(32, 32)), x=VECTOR)
    params, _, (parameters, _, _) = run(network, state, x=VECTOR)
    assert set(params["params"]) == {"policy_trunk", "value_trunk", "policy_head", "value_head", "shared"}
    kernel = params["params"]["policy_trunk"]["Dense_1"]["kernel"]
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(32), atol=1e-4)
    head = params["params"]["policy_head"]["kernel"]
    np.testing.assert_allclose(head.T @ head, 1e-4 * np.eye(6), atol=1e-7)
    assert np.abs(parameters).max() < 0.1


@pytest.mark.parametrize("recurrence", ["lstm", "gru"])
@pytest.mark.parametrize("shared_torso", [True, False])
def test_an_unroll_is_its_steps_one_after_the_other(recurrence, shared_torso):
    config = NetworkConfig(recurrence=recurrence, recurrent_size=8, shared_torso=shared_torso)
    network, state = build(config, x=VECTOR)
    params, _, _ = run(network, state, x=VECTOR)
    rng = np.random.default_rng(1)
    observation = rng.normal(size=(6, B, 5)).astype(np.float32)
    is_first = rng.random((6, B)) < 0.3
    state = jax.tree.map(lambda s: s + 0.5, state)
    unrolled = jax.jit(network.apply)(params, {"x": observation}, is_first, state)
    for t in range(6):
        parameters, value, state = network.apply(params, {"x": observation[t]}, is_first[t], state)
        np.testing.assert_allclose(unrolled[0][t], parameters, atol=1e-5)
        np.testing.assert_allclose(unrolled[1][t], value, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), unrolled[2], state)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"'nature_cnn' is for images .* x float32\[5\]: use 'mlp' or 'auto'"):
        build(NetworkConfig(torso="nature_cnn"), x=VECTOR)
    with pytest.raises(ValueError, match=r"'nature_cnn' needs .* at least 36 .* uint8\[84,84,4\]"):
        build(NetworkConfig(torso="nature_cnn"), x=ArraySpec((84, 84, 4), np.uint8))
    with pytest.raises(ValueError, match="sees no observation"):
        build(NetworkConfig())
    with pytest.raises(ValidationError, match="torso"):
        NetworkConfig(torso="resnet")
