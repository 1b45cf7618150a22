import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers of these tests, under --import-mode=importlib

from stored_examples import NAMES, example

from autopar.search.result.result import SearchResult


@pytest.fixture(params=NAMES)
def stored(request: pytest.FixtureRequest) -> SearchResult:
    return SearchResult.from_dict(example(request.param))


@pytest.fixture
def pipeline() -> SearchResult:
    return SearchResult.from_dict(example("pipeline"))


@pytest.fixture
def flat() -> SearchResult:
    return SearchResult.from_dict(example("flat"))


@pytest.fixture
def misfit() -> SearchResult:
    return SearchResult.from_dict(example("misfit"))
