"""The call of `torch.export`, and the errors that it turns into messages.

It may import what `autopar.capture` may.
"""
