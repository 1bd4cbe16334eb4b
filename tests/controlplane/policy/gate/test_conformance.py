"""The shipped conformance checks hold for every ordering, admission and victim rank of the registry."""

import pytest

from backends.testing.conformance import check_admission, check_ordering, check_victims
from controlplane.policy.gate.ordering import ShortestOutput
from controlplane.policy.registry import ADMISSIONS, ORDERINGS, VICTIMS


@pytest.mark.parametrize("ordering", [*ORDERINGS.values(), ShortestOutput])
def test_ordering_conforms(ordering):
    check_ordering(ordering)


@pytest.mark.parametrize("name", ADMISSIONS)
def test_admission_conforms(name):
    check_admission(ADMISSIONS[name])


@pytest.mark.parametrize("name", VICTIMS)
def test_victim_rank_conforms(name):
    check_victims(VICTIMS[name])
