"""Labels of one tensor degree at another: the same blocks as its own labels, and refused where heads do not divide."""

import pytest
from label_cases import program_of
from search_cases import machinery_with

from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.planning.labels import SearchLabels
from autopar.search.pricing.exact import priced

CLUSTER = ClusterSpec.preset("8xh100")


def test_labels_at_hand_price_a_degree_as_its_own() -> None:
    labels = SearchLabels(program_of("llama", layers=4, heads=16, vocabulary=512), CLUSTER)
    assert labels.hold(2, 4)
    on = machinery_with(CLUSTER, 80e9)
    degrees = Degrees(tp=4, dp_shard=2, micro_batch=1)
    seconds = [priced(labels.works(tp), degrees, on).seconds for tp in (2, 4)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


def test_labels_do_not_hold_where_an_axis_would_be_padded() -> None:
    labels = SearchLabels(program_of("llama", layers=4, heads=4, vocabulary=512), CLUSTER)
    labels.works(2)
    assert not labels.hold(2, 8)
