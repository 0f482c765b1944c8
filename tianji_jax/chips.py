"""What accelerators can do at best, and in which shapes TPUs come.

TPUs: Google Cloud TPU documentation, https://docs.cloud.google.com/tpu/docs/v4, .../v5e, .../v5p and .../v6e (read in
2026). That of v4 says nothing of its links; Jouppi et al. 2023 ("TPU v4: An Optically Reconfigurable Supercomputer")
do. GPUs: NVIDIA's data sheets, without sparsity.
"""

from dataclasses import dataclass

from tianji_jax.explain import nearest

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: for people.
      flops: peak of bfloat16 matrix products, 1/s.
      memory: bytes that programs may have; None: the device tells.
      bandwidth: of its memory, bytes/s.
      link: of one link to another device in one direction, bytes/s.
      links: how many it has; those of a GPU lead to a switch and count as one.
    """

    name: str
    flops: float
    memory: int | None
    bandwidth: float
    link: float
    links: int = 1


# Memory is what libtpu 0.0.42 lets a program have: about the documented figure (32, 16, 95 and 32 GiB or GB, as the
# documents have it). Links: the documented bandwidth of a chip, over its ports and the two directions.
TPUS = {
    "v4": Chip("TPU v4", 275e12, int(30.75 * GIB), 1200e9, 50e9, links=6),
    "v5e": Chip("TPU v5e", 197e12, int(15.75 * GIB), 819e9, 400e9 / 4 / 2, links=4),
    "v5p": Chip("TPU v5p", 459e12, int(95.74 * GIB), 2765e9, 1200e9 / 6 / 2, links=6),
    "v6e": Chip("TPU v6e", 918e12, int(31.25 * GIB), 1638e9, 800e9 / 4 / 2, links=4),
}

# By the beginning of what JAX calls them. Links: NVLink in one direction; PCIe 4.0 x16 for the L4.
GPUS = {
    "NVIDIA A100-SXM4-40GB": Chip("NVIDIA A100 40GB", 312e12, None, 1555e9, 300e9),
    "NVIDIA A100-SXM4-80GB": Chip("NVIDIA A100 80GB", 312e12, None, 2039e9, 300e9),
    "NVIDIA H100 80GB HBM3": Chip("NVIDIA H100 SXM", 989e12, None, 3350e9, 450e9),
    "NVIDIA H200": Chip("NVIDIA H200", 989e12, None, 4800e9, 450e9),
    "NVIDIA L4": Chip("NVIDIA L4", 121e12, None, 300e9, 32e9),
}

_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SOLID = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
SHAPES = {"v4": _SOLID, "v5e": _FLAT, "v5p": _SOLID, "v6e": _FLAT}
"""Slices that can be had of each, in chips along each axis; larger ones than 512 chips left out."""


@dataclass(frozen=True)
class Topology:
    """A slice of a TPU pod.

    Attributes:
      name: such as `v5e:16x16`.
      chip: of which it is made.
      shape: chips along each axis.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Along which axes the last chip is linked to the first: full axes of v5e and v6e, all those of whole cubes."""
        if len(self.shape) == 2:
            return tuple(size == 16 for size in self.shape)
        return (all(size % 4 == 0 for size in self.shape),) * 3

    @property
    def host_shape(self) -> tuple[int, int, int]:
        """Chips of one host along each axis: 2 x 2, or all of a slice that one host can hold."""
        return (*self.shape, 1) if self.shape in ((1, 1), (2, 4)) else (2, 2, 1)

    @property
    def ring_links(self) -> int:
        """Links by which a chip can send at once when all reduce together.

        Along each axis a bidirectional ring has two; where it is open, or has two chips only, each link has to do for
        both ways round.
        """
        axes = zip(self.shape, self.wraps, strict=True)
        return sum(0 if size == 1 else 2 if wraps and size > 2 else 1 for size, wraps in axes)


def find_topology(name: str) -> Topology:
    """The slice called `name`.

    Raises:
      ValueError: there is none; the message lists those that are.
    """
    generation, _, size = name.partition(":")
    shape = next((s for s in SHAPES.get(generation, ()) if "x".join(map(str, s)) == size), None)
    if shape is None:
        known = [f"{g}:{'x'.join(map(str, s))}" for g, shapes in SHAPES.items() for s in shapes]
        lines = "\n".join(f"  {' '.join(k for k in known if k.startswith(f'{g}:'))}" for g in SHAPES)
        raise ValueError(
            f"--topology: unknown topology {name!r}{nearest(name, known)}; known are\n{lines}\n  gpu (of this machine)"
        )
    return Topology(name, TPUS[generation], shape)


def find_gpu(kind: str) -> Chip | None:
    """The GPU that JAX calls `kind`; None where its limits are not in the table."""
    return next((chip for name, chip in GPUS.items() if kind.startswith(name)), None)


def wire_bytes(op: str, payload: float, devices: int) -> float:
    """Bytes that each device sends in a collective over all devices, by algorithms that send the least.

    Args:
      op: HLO's name of it.
      payload: bytes of what is reduced, gathered, scattered or exchanged: the larger of operand and result.
      devices: how many take part.

    An all-reduce is a reduce-scatter and an all-gather, each of which sends all but the device's own part (Patarasuk
    and Yuan 2009).
    """
    share = (devices - 1) / devices
    return payload * {"all-reduce": 2 * share, "collective-permute": float(devices > 1)}.get(op, share)
