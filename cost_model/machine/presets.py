"""The device profiles that autopar ships: one file per family of devices in ``presets/profiles``."""

import functools
from dataclasses import replace
from importlib import resources
from pathlib import Path

from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.machine.profile_io import load_profile
from autopar.errors import ClusterError, did_you_mean
from autopar.files.strict_yaml import files_naming
from autopar.ir.cluster import ClusterSpec
from autopar.ir.cluster_file import profile_file
from autopar.ir.device import DeviceType


@functools.cache
def shipped_profiles() -> dict[str, DeviceProfile]:
    """Every profile of ``presets/profiles`` by its name. Raises ClusterError if a file is malformed."""
    with resources.as_file(resources.files("autopar.presets") / "profiles") as folder:
        return {path.stem: _loaded(path) for path in sorted(Path(folder).glob("*.yaml"))}


@functools.cache
def device_profile(device: str, device_type: DeviceType = "cuda") -> DeviceProfile:
    """The shipped profile of a device preset."""
    with resources.as_file(resources.files("autopar.presets") / "profiles") as folder:
        for path in files_naming(Path(folder), device):
            profile = _loaded(path)
            if device in profile.devices:
                return profile
            if device in profile.unmeasured:
                note = f"no measured run of device {device} is known: it is priced like {', '.join(profile.devices)}"
                return replace(profile, devices=(), notes=(note,))
        default = _loaded(Path(folder) / ("cpu.yaml" if device_type == "cpu" else "default.yaml"))
    note = (
        f"no profile describes device {device[:80]!r}: the default profile is used; run `autopar calibrate` to "
        "measure it"
    )
    return replace(default, notes=(note,))


@functools.cache
def _loaded(path: Path) -> DeviceProfile:
    return load_profile(path)


def cluster_profile(cluster: ClusterSpec, device: str) -> DeviceProfile:
    """The profile that a cluster names, else the shipped profile of a device."""
    if cluster.profile is None:
        return device_profile(device, cluster.device_type)
    path = profile_file(cluster.profile, Path())
    if path is not None:
        return load_profile(path)
    profiles = shipped_profiles()
    if cluster.profile not in profiles:
        hint = did_you_mean(cluster.profile, tuple(profiles))
        raise ClusterError(f"cluster {cluster.name!r}: there is no profile {cluster.profile[:80]!r}; {hint}")
    return profiles[cluster.profile]
