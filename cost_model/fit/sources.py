"""The sources of a profile's numbers, by path in its file."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.machine.profile_io import NO_SOURCE, content_of_profile


def with_sources(profile: DeviceProfile, parts: Collection[str], source: Callable[[str], str]) -> DeviceProfile:
    """The profile with other sources of some numbers.

    `parts` are paths of the file. All numbers under them count. `source` gets the source that a number has.
    """

    def paths(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key != "link":
                    yield from paths(inner, f"{path}.{key}" if path else key)
        else:
            yield path

    def is_among(path: str) -> bool:
        return any(f"{path}.".startswith(f"{part}.") for part in parts)

    kept = {path: text for path, text in profile.sources.items() if not is_among(path)}
    new = {p: source(profile.sources.get(p, NO_SOURCE)) for p in paths(content_of_profile(profile), "") if is_among(p)}
    return replace(profile, sources=kept | new)
