"""Importing this module silences the warnings and logs of libraries: the first import of the server of ranks."""

import logging
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
