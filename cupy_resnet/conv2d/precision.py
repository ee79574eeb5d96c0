"""In which arithmetic a network runs: what its tensors are stored as and what multiplies them. Imports no CuPy."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Precision:
    """One way to compute.

    Args:
        name: what the user calls it.
        element: C++ type of activations and filters in the kernels (kernels_cu/include/element.cuh).
        storage: NumPy dtype of the arrays that hold them; bfloat16, which NumPy lacks, travels as uint16.
        tensor_cores: whether tensor cores multiply.
        products: TF32 products on tensor cores per fp32 product.
    """

    name: str
    element: str
    storage: np.dtype
    tensor_cores: bool
    products: int = 1

    @property
    def element_size(self) -> int:
        """Bytes per element."""
        return self.storage.itemsize

    def defines(self) -> dict[str, int | str]:
        """The ``#define``s that select it in kernels for tensor cores."""
        return {"ELEMENT": self.element, "PRODUCTS": self.products}


_FLOAT32, _FLOAT16, _UINT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16)

PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float", _FLOAT32, tensor_cores=False),
        Precision("fp32-tc", "float", _FLOAT32, tensor_cores=True, products=3),
        Precision("tf32", "float", _FLOAT32, tensor_cores=True),
        Precision("fp16", "Half", _FLOAT16, tensor_cores=True),
        Precision("bf16", "BFloat16", _UINT16, tensor_cores=True),
    )
}
"""By name. Sums are in fp32 everywhere, and so are biases, pooled features and logits."""
