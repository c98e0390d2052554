"""Which groups and samples are worth training on."""

from rollmill.filters.dynamic import DynamicFilter
from rollmill.filters.over_sampling import load_ranking
from rollmill.filters.verdict import KEEP, Verdict

__all__ = ["KEEP", "DynamicFilter", "Verdict", "load_ranking"]
