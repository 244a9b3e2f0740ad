"""The noise of a configuration: its source, and its calibration to a target epsilon.

`[privacy] target_epsilon`, against `target_adversary`, for `target_unit`, determines `method.noise_multiplier` from the
plan alone, before training. A multiplier in the file then has no effect.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any

from fedveil.data.registry import is_own_data
from fedveil.errors import InputError, within
from fedveil.experiment.config import Config, build_method, make_config
from fedveil.methods.method import AnyMethod, field_names
from fedveil.privacy.accounting import epsilon_of
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.releases import Adversary, Plan, Release, Unit, Unprotected
from fedveil.session.privacy_guard import declared, noise_for, unit_of
from fedveil.streams import NoiseSource


@dataclass(frozen=True)
class Calibrated:
    """The calibrated noise multiplier and its epsilon."""

    adversary: Adversary
    unit: Unit
    noise_multiplier: float
    epsilon: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> str:
        return (
            f"noise multiplier {self.noise_multiplier:g}: epsilon {self.epsilon:.4g} "
            f"for the {self.unit} against the {self.adversary}"
        )


def method_of(config: Config, plan: Plan) -> tuple[AnyMethod, Calibrated | None]:
    """The method of a configuration for this plan, with calibrated noise if the configuration has a target."""
    section = config.privacy
    if section.target_epsilon is None:
        return config.build_method(), None
    found = _calibrated(
        config.to_toml(),
        plan,
        section.target_epsilon,
        section.target_adversary,
        section.target_unit,
    )
    return with_noise(config, found.noise_multiplier), found


def noise_source(config: Config, method: AnyMethod, plan: Plan) -> NoiseSource:
    """The source of privacy noise and cohorts in runs of this configuration."""
    if config.run.engine == "flower":
        return "entropy"
    return noise_for(method, plan, config.run.noise, own_data=is_own_data(config.task.dataset))


def with_target_noise(config: Config, plan: Plan) -> Config:
    """The configuration with the multiplier in place of the target, for nodes of unknown sizes."""
    if config.privacy.target_epsilon is None:
        return config
    small, large = (replace(plan, records_per_client=n, largest_client=m) for n, m in ((1, 1), (500, 10**6)))
    one = with_noise(config, 1.0)
    if one.releases(small) != one.releases(large):
        raise InputError(
            "privacy.target_epsilon",
            config.privacy.target_epsilon,
            "this method's guarantee depends on the nodes' sizes, which are not known yet",
            "Give method.noise_multiplier: see `fedveil account --target-epsilon`.",
        )
    _, found = method_of(config, plan)
    assert found is not None
    return config.model_copy(
        update={
            "method": config.method | {"noise_multiplier": found.noise_multiplier},
            "privacy": config.privacy.model_copy(update={"target_epsilon": None}),
        }
    )


def with_noise(config: Config, sigma: float) -> AnyMethod:
    """The method of a configuration with this noise multiplier."""
    method = build_method(config.method)
    if "noise_multiplier" not in field_names(method):
        raise InputError(
            "method.name", method.name, "has no noise_multiplier to vary", "Choose a method that adds noise."
        )
    return config.with_method(noise_multiplier=sigma).build_method()


def check_noise_counts(config: Config, plan: Plan) -> None:
    """Refuse to vary a noise multiplier that does not affect epsilon (sparse-vector has its own)."""
    some, more = (with_noise(config, sigma).releases(plan) for sigma in (1.0, 2.0))
    if some == more and not any(isinstance(r.protection, Unprotected) for r in some):
        raise InputError(
            "method.noise_multiplier",
            config.method.get("noise_multiplier", "the default"),
            "does not affect the guarantee of this configuration",
            "Change the field that its epsilon depends on, such as upload_epsilon.",
        )


def calibrated(
    config: Config, plan: Plan, target: float, adversary: Adversary, unit: Unit | None = None
) -> Calibrated:
    """The smallest noise for which epsilon against this adversary is at most the target."""
    delta, deployed = config.privacy.delta / config.run.ends, config.run.engine == "flower"

    def releases(sigma: float) -> tuple[Release, ...]:
        return declared(with_noise(config, sigma), plan, deployed=deployed)

    unit = unit or unit_of(with_noise(config, 1.0), plan)
    sigma = _shown_above(calibrate(releases, plan, delta, target, adversary, unit))
    return Calibrated(adversary, unit, sigma, epsilon_of(releases(sigma), plan, delta, adversary, unit))


@functools.lru_cache(maxsize=32)
def _calibrated(
    content: str, plan: Plan, target: float, adversary: Adversary, unit: Unit | None
) -> Calibrated:
    """The calibration, cached for the seeds of an experiment."""
    config = make_config(tomllib.loads(content))
    check_noise_counts(config, plan)
    with within("privacy"):
        return calibrated(config, plan, target, adversary, unit)


def _shown_above(value: float) -> float:
    """The multiplier rounded up to the digits shown, so that copying it still meets the target."""
    last = -1 if value >= 100 else math.floor(math.log10(value)) - 3
    return float(Decimal(value).quantize(Decimal(1).scaleb(last), ROUND_CEILING))
