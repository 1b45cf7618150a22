"""The precision of a plan: dtypes of stored parameters, of computing, and of sums of gradients.

With a precision, parameters and the optimizer's state are float32 (master weights). Blocks get the parameters in the
precision's dtype. The program is captured so: its parameters have the dtype of computing. Without a precision,
parameters are stored and used in the dtype in which the model is written. fp8 and mxfp8 are bf16 with linear layers
whose operands have eight bits (`autopar.rules.scaled_product`).

| value                                        | without a precision     | with a precision                        |
|----------------------------------------------|-------------------------|-----------------------------------------|
| trained parameters, gradients, state         | the model's dtype       | float32 (`stored_dtype`)                |
| frozen parameters                            | the model's dtype       | the precision's dtype                   |
| parameters in blocks, activations, inputs    | the model's dtype       | the precision's dtype (`COMPUTE_DTYPES`)|
| sums of gradients over ranks (`summed_dtype`)| the gradient's dtype    | float32                                 |

`reduce_dtype` replaces the last row. This module imports torch only inside functions.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

REDUCE_DTYPES = ("fp32", "bf16", "fp16")
EIGHT_BITS = ("fp8", "mxfp8")
COMPUTE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "mxfp8": "bfloat16"}
PRECISIONS = tuple(COMPUTE_DTYPES)
MASTER_DTYPE = "float32"
MASTER_BYTES = 4  # of an element


class Precise(Protocol):
    """The words of a plan's degrees about precision. With this protocol the module does not import degrees."""

    @property
    def precision(self) -> str | None: ...
    @property
    def reduce_dtype(self) -> str | None: ...


class StoredParameter(Protocol):
    """A parameter: its dtype in the program, and whether it is trained."""

    @property
    def dtype(self) -> "torch.dtype": ...
    @property
    def requires_grad(self) -> bool: ...


def compute_dtype(precision: str) -> "torch.dtype":
    """The dtype of parameters in blocks, of activations and of floating inputs."""
    return _dtype(COMPUTE_DTYPES[precision])


def stored_dtype(parameter: StoredParameter, degrees: Precise) -> "torch.dtype":
    """The dtype in which a parameter is stored. A frozen one needs no master weight, and has the dtype of computing."""
    return _master_dtype(parameter.dtype, degrees) if parameter.requires_grad else parameter.dtype


def _master_dtype(dtype: "torch.dtype", degrees: Precise) -> "torch.dtype":
    return _dtype(MASTER_DTYPE) if degrees.precision is not None and dtype.is_floating_point else dtype


def summed_dtype(dtype: "torch.dtype", degrees: Precise) -> "torch.dtype":
    """The dtype in which ranks sum the gradient of a parameter. `dtype` is its dtype in the program."""
    if degrees.reduce_dtype is not None and dtype.is_floating_point:
        return compute_dtype(degrees.reduce_dtype)
    return _master_dtype(dtype, degrees)


def like_kind(dtype: "torch.dtype", wanted: "torch.dtype") -> "torch.dtype":
    """A floating dtype as `wanted`, and a complex one with parts of `wanted`. Other dtypes stay as they are."""
    return wanted.to_complex() if dtype.is_complex else wanted if dtype.is_floating_point else dtype


def as_float64(tensor: "torch.Tensor") -> "torch.Tensor":
    """A tensor in float64, or in complex128 if it has imaginary parts. It takes no part in autograd."""
    return tensor.detach().to(_dtype("complex128" if tensor.is_complex() else "float64"))


def is_low(dtype: "torch.dtype") -> bool:
    """Whether a dtype has 16 bits or less and a floating point."""
    return dtype.is_floating_point and dtype.itemsize <= 2


def _dtype(name: str) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
