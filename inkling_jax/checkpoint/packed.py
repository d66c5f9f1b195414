"""4-bit weights in files: the tensors that hold the words, the scales and the experts' scales, as exporters spell them.

A packed weight lies under the name of the plain one and in its order of rows, gate and up interleaved or not, and so
do the rows of its scales.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from inkling_jax.quantization import Format
from pallas_kernels.fp4 import BLOCK_OF, VALUES_A_WORD

from .files import STORED, Outgoing, Spec, Tensor
from .names import ONE, PLAIN, Form, Shape, Stored, Variant, stored

_EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.experts\.\w+")
_UNUSED = re.compile(r"(_weight)?[._](input_(amax|scale|global_scale)|original_shape)")


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names of the tensors of a packed weight: {name} is that of the plain one, {stem} the same without "_weight".

    `divides`: the expert's scale divides, and is [E, 1]. `flat`: experts and rows of the scales are one axis.
    """

    format: Format
    codes: str
    scales: str
    expert_scale: str | None = None
    divides: bool = False
    flat: bool = False

    def names(self, plain: str) -> dict[str, str]:
        """The name of each tensor."""
        fill = {"name": plain, "stem": plain.removesuffix("_weight")}
        leaves: dict[str, str | None] = {"codes": self.codes, "scales": self.scales, "expert_scale": self.expert_scale}
        return {leaf: template.format(**fill) for leaf, template in leaves.items() if template}

    def dtype(self, leaf: str) -> str:
        """The dtype of a tensor, as safetensors spells it."""
        if leaf == "codes":
            return "U8"
        return "F32" if leaf == "expert_scale" else "F8_E4M3" if self.format == "nvfp4" else "U8"

    def form(self, leaf: str, plain: Form) -> Form:
        """The form of a tensor whose plain weight has the form `plain`."""
        if leaf == "codes":
            return Form(
                lambda shape: plain.shapes((*shape[:-1], 4 * shape[-1])),
                lambda array: plain.views(array.view(np.uint8)),  # four bytes of a word, the lowest first
                lambda window: plain.windows((*window[:-1], window[-1].times(4))),
            )
        if leaf == "expert_scale":
            return _COLUMN if self.divides else PLAIN
        return replace(plain, shapes=lambda shape: [_flat(*plain.shapes(shape))]) if self.flat else plain


def _flat(shape: Shape) -> Shape:
    return (shape[0] * shape[1], *shape[2:])


_COLUMN = Form(lambda shape: [(*shape, 1)], lambda array: [array[:, None]], lambda window: [(*window, ONE)])

MODELOPT = Spelling("nvfp4", "{name}", "{name}.scale", "{name}.scale2")
QUARK = Spelling("mxfp4", "{name}", "{name}_scale", flat=True)
SPELLINGS = (
    MODELOPT,
    QUARK,
    *(
        Spelling("nvfp4", f"{prefix}_packed", f"{prefix}_scale", f"{prefix}_global_scale", divides=True)
        for prefix in ("{stem}.weight", "{name}.weight", "{stem}_weight")
    ),
)
LEAF_DTYPES = {"codes": np.dtype(np.uint32), "scales": np.dtype(np.uint8), "expert_scale": np.dtype(np.float32)}
_WRITTEN: dict[Format, Spelling] = {"nvfp4": MODELOPT, "mxfp4": QUARK}


def layer_of(path: str) -> int | None:
    """The layer whose routed experts a parameter holds, None for any other parameter."""
    match = _EXPERTS.fullmatch(path)
    return int(match[1]) if match else None


def leaf_shapes(shape: Shape, format: Format) -> dict[str, Shape]:
    """Shapes of the arrays that hold a weight [E, .., I] in 4 bits."""
    shapes: dict[str, Shape] = {
        "codes": (*shape[:-1], shape[-1] // VALUES_A_WORD),
        "scales": (*shape[:-1], shape[-1] // BLOCK_OF[format]),
    }
    return shapes | ({"expert_scale": shape[:1]} if format == "nvfp4" else {})


def find_packed(
    tensors: Mapping[str, Tensor], places: list[Stored], said: Format | None
) -> tuple[Spelling, Stored] | None:
    """How and in which of its places a weight is packed, None where it is not.

    Where the packed tensor has the plain name, its dtype tells that it is packed, and by whom, the format that is
    `said`, or the name of the scales.
    """
    for place in places:
        found = []
        for spelling in SPELLINGS if len(place.names) == 1 else ():
            names = spelling.names(place.names[0])
            codes = tensors.get(names["codes"])
            if codes is not None and (codes.dtype == "U8" or names["codes"] != place.names[0]):
                found.append((spelling.format == said, names["scales"] in tensors, spelling))
        if found:
            return max(found, key=lambda choice: choice[:2])[-1], place
    return None


def unused_beside(codes: str, plain: str) -> re.Pattern[str]:
    """Names of tensors beside a packed weight that the weights do not need: scales of activations, a shape."""
    stems = {plain, plain.removesuffix("_weight"), codes.removesuffix("_packed").removesuffix(".weight")}
    return re.compile(f"(?:{'|'.join(map(re.escape, sorted(stems)))}){_UNUSED.pattern}")


def outgoing(
    path: str, shape: Shape, format: Format, load: Callable[[], Iterator[Mapping[str, np.ndarray]]]
) -> Outgoing:
    """The tensors, in the original layout, of a weight [E, .., I] in 4 bits; `load` gives arrays of experts in turn."""
    spelling, place = _WRITTEN[format], stored(path, Variant("original"))
    [plain], [unpacked] = place.names, place.form.shapes(shape)
    shapes, names = leaf_shapes(shape, format), spelling.names(plain)
    forms = {leaf: spelling.form(leaf, place.form) for leaf in names}
    specs = [
        Spec(name, STORED[spelling.dtype(leaf)], *forms[leaf].shapes(shapes[leaf])) for leaf, name in names.items()
    ]
    if spelling is MODELOPT:
        specs.append(Spec(f"{plain}.original_shape", STORED["I64"], (len(unpacked),)))

    def views() -> Iterator[tuple[np.ndarray, ...]]:
        rest = [np.array(unpacked, np.int64)] if spelling is MODELOPT else []
        for arrays in load():
            yield (*(forms[leaf].views(arrays[leaf])[0] for leaf in names), *rest)
            rest = [array[:0] for array in rest]

    return Outgoing(tuple(specs), views)
