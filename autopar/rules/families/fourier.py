"""Fourier transforms and complex numbers: transformed dimensions are whole, the others are parallel. All are linear."""

from collections.abc import Callable
from typing import Any

from autopar._torch.operators import aten
from autopar.rules.families._notation import dim_indices, places_whole
from autopar.rules.registry import pattern, rule
from autopar.rules.rule import Call, Rule

ONE_DIM = (aten.fft_fft, aten.fft_ifft, aten.fft_rfft, aten.fft_irfft, aten.fft_hfft, aten.fft_ihfft)
TWO_DIMS = (aten.fft_fft2, aten.fft_ifft2, aten.fft_rfft2, aten.fft_irfft2)
MANY_DIMS = (aten.fft_fftn, aten.fft_ifftn, aten.fft_rfftn, aten.fft_irfftn)
SHIFTS = (aten.fft_fftshift, aten.fft_ifftshift)


def _transformed(position: int, default: Any) -> Callable[[Call], Rule]:
    """The rule of operators whose argument number `position` names the transformed dimensions, all if it is None."""

    def transformed(call: Call) -> Rule:
        over = call.arg(position, "dim", default)
        lengths = call.arg(1, "s") if position == 2 else None
        if over is None and isinstance(lengths, (list, tuple)):  # the last ones
            over = list(range(-len(lengths), 0))
        return places_whole(call, dim_indices(over, len(call.operands[0].shape)), True)

    return transformed


rule(*(packet.default for packet in ONE_DIM))(_transformed(2, -1))
rule(*(packet.default for packet in TWO_DIMS))(_transformed(2, [-2, -1]))
rule(*(packet.default for packet in MANY_DIMS))(_transformed(2, None))
rule(*(packet.default for packet in SHIFTS))(_transformed(1, None))

pattern(aten.stft.default, "... t[, w] -> ... f m", whole="t w f m", linear=[[0]])
pattern(aten.view_as_real.default, "... -> ... p", whole="p", linear=[[0]])
pattern(aten.view_as_complex.default, "... p -> ...", whole="p", linear=[[0]])
