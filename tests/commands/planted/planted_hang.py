"""A module that sends SIGSTOP to rank 1 before its third step."""

import signal

from planted_signal import send

send(signal.SIGSTOP, before_step=3)
