"""What every test runs under: one thread, no network, reproducible draws. torch itself is not imported here."""

import os
import sys

# Before torch or transformers are imported, here or in the processes a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

if "torch" in sys.modules:  # a plugin was earlier: the environment comes too late
    sys.modules["torch"].set_num_threads(1)

try:
    import hypothesis
except ModuleNotFoundError:  # the bare-core run has no hypothesis
    pass
else:
    hypothesis.settings.register_profile("local", deadline=None)
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
