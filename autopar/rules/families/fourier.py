"""Fourier transforms and complex numbers: transformed dimensions are whole, the others are parallel. All are linear."""

from autopar._torch.operators import aten
from autopar.rules.families._notation import dim_indices, places_whole
from autopar.rules.registry import Pattern, rule
from autopar.rules.rule import Call, Rule

ONE_DIM = (aten.fft_fft, aten.fft_ifft, aten.fft_rfft, aten.fft_irfft, aten.fft_hfft, aten.fft_ihfft)
TWO_DIMS = (aten.fft_fft2, aten.fft_ifft2, aten.fft_rfft2, aten.fft_irfft2)
MANY_DIMS = (aten.fft_fftn, aten.fft_ifftn, aten.fft_rfftn, aten.fft_irfftn)
SHIFTS = (aten.fft_fftshift, aten.fft_ifftshift)


@rule(*(packet.default for packet in (*ONE_DIM, *TWO_DIMS, *MANY_DIMS, *SHIFTS)))
def transformed(call: Call) -> Rule:
    """All dimensions are transformed if none is named."""
    over, lengths = call.named("dim"), call.named("s")
    if over is None and isinstance(lengths, (list, tuple)):  # the last ones
        over = list(range(-len(lengths), 0))
    return places_whole(call, dim_indices(over, len(call.operands[0].shape)), True)


rule(aten.stft.default)(Pattern("... t[, w] -> ... f m", whole="t w f m", linear=((0,),)))
rule(aten.view_as_real.default)(Pattern("... -> ... p", whole="p", linear=((0,),)))
rule(aten.view_as_complex.default)(Pattern("... p -> ...", whole="p", linear=((0,),)))
