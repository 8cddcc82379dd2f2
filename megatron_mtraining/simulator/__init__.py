"""Predicts time, balance and memory of a ring on a cluster that is not at hand. ``python -m megatron_mtraining.simulate``."""

from .cost import H200_LINKS, H200_RATES, Link, Links, Rates, Shape, fit_rates
from .generate import Pattern, make_profile
from .predict import PAPER, Balance, Choice, Cluster, Prediction, Predictor, StepTimes
from .work import IndexProfile, RankWork, head_parallel_imbalance

__all__ = [
    "H200_LINKS",
    "H200_RATES",
    "PAPER",
    "Balance",
    "Choice",
    "Cluster",
    "IndexProfile",
    "Link",
    "Links",
    "Pattern",
    "Prediction",
    "Predictor",
    "RankWork",
    "Rates",
    "Shape",
    "StepTimes",
    "fit_rates",
    "head_parallel_imbalance",
    "make_profile",
]
