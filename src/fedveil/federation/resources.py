"""Limits on computation and memory that a server may request, checked by the node before anything is charged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedveil.engines.flower.wire import RefusalError
from fedveil.errors import FedveilError
from fedveil.experiment.config import Config
from fedveil.experiment.sections import TextSection
from fedveil.federation.policy import Policy
from fedveil.methods.method import AnyMethod
from fedveil.privacy.releases import Plan

_INDEX_BYTES = 8


def require_affordable(
    config: Config, policy: Policy, *, records: int, classes: int, example_bytes: int
) -> None:
    """Refuse a configuration that requires more steps or memory than the policy allows; the refusal names the field.

    Args:
        config: The server's configuration.
        policy: The node's policy, of which `maximum_steps` and `maximum_message` are used.
        records: Number of examples that the node trains on.
        classes: Number of classes of the run.
        example_bytes: The size of one example in the model's input; 0 for texts, whose size follows from the
            configuration.
    """
    sections: dict[str, Any] = {
        "method": config.method,
        "wrap": config.wrap,
        "task.model_options": config.task.model_options,
        "task.feature_options": config.task.feature_options,
        "task.classes": classes,
    }
    if config.task.text is not None:
        sections["task.text"] = config.task.text.model_dump()
    for field, number in _whole_numbers(sections):
        if abs(number) > policy.maximum_steps:
            raise RefusalError("size", f"{field} = {number}, maximum_steps = {policy.maximum_steps}", field)
    if example_bytes == 0:
        length = (config.task.text or TextSection()).length
        if records * length * _INDEX_BYTES > policy.maximum_message:
            raise RefusalError("size", f"{records} texts of {length} tokens", "task.text.length")
    elif config.task.features is not None and records * example_bytes > policy.maximum_message:
        text = f"features of {records} records, {example_bytes} bytes each"
        raise RefusalError("size", text, "task.feature_options")
    of_one = example_bytes or length * _INDEX_BYTES

    def problem(section: Mapping[str, Any]) -> str | None:
        method = config.model_copy(update={"method": dict(section)}).build_method()
        return _problem(method, policy, records, classes, of_one)

    found = problem(config.method)
    if found is not None:
        raise RefusalError("size", found, f"method.{_blamed(config.method, problem)}")


def require_counted(plan: Plan, policy: Policy) -> None:
    """Refuse a plan with more clients or rounds than the policy allows."""
    for field in ("clients", "rounds"):  # a cohort is at most all clients
        number = getattr(plan, field)
        if number > policy.maximum_steps:
            text = f"plan.{field} = {number}, maximum_steps = {policy.maximum_steps}"
            raise RefusalError("size", text, f"run.{field}")


def _problem(method: AnyMethod, policy: Policy, records: int, classes: int, example_bytes: int) -> str | None:
    """The limit that this method exceeds, in words; None if it exceeds none."""
    try:
        demand = method.demand(Plan(1, 1, "all", 1, records, records), records, classes)
    except ArithmeticError as error:
        return f"the number of steps cannot be counted ({type(error).__name__})"
    if demand.steps > policy.maximum_steps:
        return f"{demand.steps} steps, maximum_steps = {policy.maximum_steps}"
    size = demand.examples * example_bytes + demand.indices * _INDEX_BYTES
    if size > policy.maximum_message:
        return f"{size} bytes in memory, maximum_message = {policy.maximum_message}"
    return None


def _blamed(section: Mapping[str, Any], problem: Callable[[Mapping[str, Any]], str | None]) -> str:
    """The field that makes the method exceed a limit; `name` if no single one does."""
    numbers_first = sorted(section, key=lambda field: isinstance(section[field], str))
    for field in numbers_first:
        try:
            if field != "name" and problem({k: v for k, v in section.items() if k != field}) is None:
                return field
        except FedveilError:  # the other fields are invalid without it
            continue
    return "name"


def _whole_numbers(value: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number in this part of a configuration, with its key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _whole_numbers(inner, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _whole_numbers(inner, place)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield place, value
