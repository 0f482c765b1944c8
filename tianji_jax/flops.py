"""How many floating-point operations a traced program takes.

Matrix products and convolutions are counted, which is what accelerators' peaks are about, two operations for each
multiplication with its addition. Loops count as often as they run: XLA's own `cost_analysis` counts their bodies once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


def count_flops(jaxpr: Any) -> float:
    """Operations of one call of a jaxpr (as `jax.make_jaxpr` gives it); inside a `shard_map` those of one device.

    Of branches the most expensive counts. A loop whose length only the run knows (`jax.lax.while_loop`) counts once.
    """
    return sum(_of_equation(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name in _COUNTED:
        return _COUNTED[name](equation)
    inner = [count_flops(jaxpr) for jaxpr in _jaxprs(params.values())]
    if name == "cond":
        return max(inner, default=0.0)
    return params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)


def _jaxprs(values: Any) -> Iterator[Any]:
    for value in values:
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value
        elif isinstance(value, tuple | list):
            yield from _jaxprs(value)


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, (out,) = equation.invars[0].aval.shape, equation.outvars
    return 2.0 * math.prod(out.aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: Any) -> float:
    """Products with padding, and with the holes of a dilated input, do not count."""
    params, dims = equation.params, equation.params["dimension_numbers"]
    image, kernel = (x.aval.shape for x in equation.invars)
    out = equation.outvars[0].aval.shape
    products = out[dims.out_spec[0]] * out[dims.out_spec[1]] * kernel[dims.rhs_spec[1]]
    windows = zip(
        params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True
    )
    axes = zip(dims.lhs_spec[2:], dims.rhs_spec[2:], dims.out_spec[2:], windows, strict=True)
    return 2.0 * products * math.prod(_pairs((image[i], kernel[k], out[o]), window) for i, k, o, window in axes)


def _pairs(sizes: tuple[int, int, int], window: tuple[int, Sequence[int], int, int]) -> int:
    """Pairs along one axis of an output and a kernel entry that meet an entry of the input."""
    (size, kernel, out), (stride, (low, _), hole, dilation) = sizes, window
    place = np.arange(out)[:, None] * stride + np.arange(kernel) * dilation - low
    return int(np.sum((place >= 0) & (place <= (size - 1) * hole) & (place % hole == 0)))


_COUNTED: dict[str, Callable[[Any], float]] = {"dot_general": _dot, "conv_general_dilated": _convolution}
