"""A module that sends SIGKILL to rank 1 long after its own trial, when it is the best plan and steps beside another."""

import signal

from planted_signal import send

send(signal.SIGKILL, before_step=15)
