"""Which layers of a model hold the weights of their routed experts in 4 bits, and in what format."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from inkling_jax.config import InklingConfig

Format = Literal["nvfp4", "mxfp4"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True, slots=True)
class Quantization:
    """`layers` hold their routed experts in `format`; everything else is as it is without quantisation.

    Raises ValueError for another format, and for layers that are not a list of ids.
    """

    format: Format
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format: expected {' or '.join(FORMATS)}, found {self.format!r}")
        if not all(type(i) is int and i >= 0 for i in self.layers):
            raise ValueError(f"layers: expected ids of layers, found {self.layers!r}")
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))

    @classmethod
    def of_model(cls, config: "InklingConfig", format: Format) -> "Quantization":
        """What `quantize` makes of a model: all layers with routed experts but the first, as the published ones.

        Raises ValueError for another format, where there is no such layer, and as `check` does.
        """
        quantization = cls(format, tuple(i for i in range(config.num_layers) if not config.is_dense(i))[1:])
        if not quantization.layers:
            only = "the first layer with routed experts stays as it is, and there is no other"
            raise ValueError(f"quantization: nothing to hold in 4 bits: {only}")
        quantization.check(config)
        return quantization

    def of_layer(self, i: int) -> Format | None:
        """The format of layer `i`'s routed experts, None where they are not quantised."""
        return self.format if i in self.layers else None

    def check(self, config: "InklingConfig") -> None:
        """Raises ValueError where a layer has no routed experts, or their inputs are not whole blocks of a scale."""
        from pallas_kernels.fp4 import BLOCK_OF

        block = BLOCK_OF[self.format]
        for i in self.layers:
            if i >= config.num_layers or config.is_dense(i):
                raise ValueError(f"layers: layer {i} of {config.num_layers} has no routed experts to hold in 4 bits")
        for name in ("hidden_size", "expert_size"):
            if getattr(config, name) % block:
                raise ValueError(f"{name} = {getattr(config, name)}: {self.format} needs a multiple of {block}")


def quantization_of(paths: Iterable[str]) -> Quantization | None:
    """The quantisation that parameters by dotted path have, None where no weight among them is packed."""
    layers: set[int] = set()
    scaled = False
    for path in paths:
        if match := re.fullmatch(r"layers\.(\d+)\.mlp\.experts\.w\w+\.(codes|scales|expert_scale)", path):
            layers.add(int(match[1]))
            scaled |= match[2] == "expert_scale"
    return Quantization("nvfp4" if scaled else "mxfp4", tuple(layers)) if layers else None
