"""A module that sends SIGKILL to rank 1 before its third step."""

import signal

from planted_signal import send

send(signal.SIGKILL, before_step=3)
