"""dp-accounting without most of its import: the same numbers, and other programs get the modules they import."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from scipy.stats import binom, norm

from fedveil.privacy.dp_library import Normal
from fedveil.privacy.releases import Plan
from fedveil.privacy.sampling import cohort_sizes


def test_the_normal_distribution_has_the_bits_of_scipy() -> None:
    rng = np.random.default_rng(0)
    ends = [0.0, -np.inf, np.inf, np.nan, 1e300, -1e300, 5e-324]
    for scale in (1e-3, 0.7, 1.0, 3.3, 250.0):
        theirs, ours = norm(scale=scale), Normal(scale)
        x = np.concatenate([rng.normal(size=5000) * scale * 12, ends])
        p = np.concatenate([rng.random(5000) ** 8, [0.0, 1.0, np.nan]])
        assert np.array_equal(theirs.cdf(x), ours.cdf(x), equal_nan=True)
        assert np.array_equal(theirs.logcdf(x), ours.logcdf(x), equal_nan=True)
        assert np.array_equal(theirs.ppf(p), ours.ppf(p), equal_nan=True)


def _prints(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_imported_afterwards_is_the_library_itself() -> None:
    code = """
import fedveil.privacy.dp_library as ours, sys
missing = [name for name in ("dp_accounting", "scipy.stats", "scipy.signal") if name in sys.modules]
import dp_accounting, scipy.stats, scipy.signal
event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), 3)
theirs = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-5)
print(missing, scipy.stats.norm.cdf(0), 1 < theirs < 20, dp_accounting.pld.common is ours.common)
"""
    assert _prints(code) == "[] 0.5 True True"


def test_loaded_before_or_after_the_numbers_are_the_same() -> None:
    code = """
{}
from fedveil.privacy.accounting import account
from fedveil.privacy.mechanisms import Gaussian
from fedveil.privacy.releases import ADVERSARIES, LaplaceNoise, Plan, Release
plan = Plan(100, 10, "poisson", 5, 10, 10)
for protection in (Gaussian(1.0, 1.1).protection(), LaplaceNoise(0.5)):
    for unit in ("record", "client"):
        told = (Release("a sum", unit, ADVERSARIES, protection),)
        print([row.epsilon for row in account(told, plan, 1e-5)])
"""
    late = _prints(code.format(""))
    assert late == _prints(code.format("import dp_accounting, scipy.stats, scipy.signal"))


def test_a_cohorts_sizes_have_the_probabilities_of_scipy() -> None:
    for clients, cohort, present in ((5, 1, 0), (100, 10, 1), (1000, 990, 0), (100_000, 50, 1), (7, 7, 0)):
        plan = Plan(clients, cohort, "poisson", 3, 10, 10)
        sizes = cohort_sizes(plan, present)
        others = clients - present
        for size, chance in sizes:
            expected = binom.pmf(size - present, others, plan.rate)
            assert abs(chance - expected) <= 1e-11 * expected + 1e-300
        assert abs(sum(chance for _, chance in sizes) - 1) < 1e-12
        assert binom.sf(sizes[-1][0] - present, others, plan.rate) <= 1e-20


def test_the_parts_of_numpy_are_left_out_and_there_when_asked_for() -> None:
    code = """
import sys
import numpy, fedveil.privacy.dp_library
parts = ("f2py", "testing", "polynomial")
held = [part for part in parts if type(sys.modules.get("numpy." + part)).__name__ == "LazyModule"]
numpy.testing.assert_array_equal(numpy.polynomial.Polynomial([1, 2])(3), 7)
print(held, type(numpy.f2py).__name__, numpy.testing.__spec__ is not None)
"""
    assert _prints(code) == "[] module True"
