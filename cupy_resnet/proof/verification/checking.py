"""Two recordings side by side: `Report`, and the functions that make one."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...model import Model
from ...networks import Network, describe, list_models
from .metrics import Comparison, compare
from .recording import Recording, recording_of, run_steps
from .tolerances import Tolerance, depths, tolerance_for

_CONVOLUTIONS_IN_A_BLOCK = 3  # at most, for networks of unknown structure


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a comparison of two recordings found.

    Attributes:
        model: the network's name; None if neither recording tells.
        ours, reference: in words, what computed the two sides.
        weights: the weights' name; empty if unknown.
        input_from, input_shape: the input, in words, and (N, C, H, W).
        step: whether each part started from the reference's own values.
        tolerance: of one operation.
        comparisons: one per checkpoint, in the order they are computed.
        missing: what could not be compared, and why, in words.
        notes: what else may explain a difference, in words.
    """

    model: str | None
    ours: str
    reference: str
    weights: str
    input_from: str
    input_shape: tuple[int, ...]
    step: bool
    tolerance: Tolerance
    comparisons: tuple[Comparison, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first_over(self) -> Comparison | None:
        """The first checkpoint over its tolerance; None if there is none."""
        return next((comparison for comparison in self.comparisons if not comparison.passed), None)

    @property
    def worst(self) -> Comparison:
        """The checkpoint that uses the largest share of its tolerance."""
        return max(self.comparisons, key=lambda comparison: comparison.share)

    @property
    def passed(self) -> bool:
        """Whether every checkpoint is within its tolerance."""
        return self.first_over is None

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold."""
        first = self.first_over
        return {
            "model": self.model,
            "weights": self.weights,
            "ours": self.ours,
            "reference": self.reference,
            "input": {"from": self.input_from, "shape": list(self.input_shape)},
            "step": self.step,
            "tolerance": self.tolerance.to_dict(),
            "passed": self.passed,
            "first_over": None if first is None else first.name,
            "checkpoints": [comparison.to_dict() for comparison in self.comparisons],
            "missing": list(self.missing),
            "notes": list(self.notes),
        }


def check(ours: Recording, reference: Recording) -> Report:
    """Compares two recordings at every checkpoint that both have.

    Args:
        ours: what is verified.
        reference: what it is measured by.

    Raises:
        ValueError: they are of different models or inputs, share no checkpoint, or a shape differs; the message tells.
    """
    _check_comparable(ours, reference)
    network = _network(ours, reference)
    names = [name for name in _names(ours.values, network) if name in reference.values]
    if not names:
        raise ValueError(
            f"{ours.computed_by} and {reference.computed_by} have no checkpoint in common: "
            f"{', '.join(ours.values)} here, {', '.join(reference.values)} there"
        )
    missing = [
        f"{name}: not in {place.computed_by}"
        for values, place in ((ours.values, reference), (reference.values, ours))
        for name in values
        if name not in place.values
    ]
    values = ((name, ours.values[name]) for name in names)
    return _report(ours, reference, values, network, names, missing, step=False)


def check_steps(model: Model, reference: Recording) -> Report:
    """Compares each part of a model on its own: it is given the reference's values in front of it.

    Errors of earlier parts cannot reach it, so that whatever is over its tolerance is guilty itself.

    Args:
        model: what is verified.
        reference: its input is what the stem is given.

    Raises:
        ValueError: as `check`.
    """
    x = np.ascontiguousarray(reference.input, np.float32)
    ours = recording_of(model, {}, x, reference.input_from)
    _check_comparable(ours, reference)
    missing: dict[str, str] = {}
    before: str | None = None
    for name in model.checkpoint_names:
        if name not in reference.values:
            missing[name] = f"{name}: not in {reference.computed_by}"
        elif before is not None and before not in reference.values:
            missing[name] = f"{name}: its input, {before}, is not in {reference.computed_by}"
        before = name
    names = [name for name in model.checkpoint_names if name not in missing]
    if not names:
        raise ValueError(
            f"{reference.computed_by} has no checkpoint of {model.name} together with its input: there are "
            f"{', '.join(reference.values)}"
        )
    values = ((name, value) for name, value in run_steps(model, x, reference.values) if name in names)
    return _report(ours, reference, values, _network(ours, reference), names, list(missing.values()), step=True)


def _report(
    ours: Recording,
    reference: Recording,
    values: Iterable[tuple[str, np.ndarray]],
    network: Network | None,
    names: list[str],
    missing: list[str],
    *,
    step: bool,
) -> Report:
    tolerance = tolerance_for(ours.precision, reference.precision)
    depth = _guessed_depths(names) if network is None else depths(network, step=step)
    comparisons = []
    for name, value in values:
        try:
            comparisons.append(compare(name, value, reference.values[name], tolerance, depth[name]))
        except ValueError as error:
            raise ValueError(f"{error} ({ours.computed_by}; {reference.computed_by}){_layout_hint(value)}") from error
    notes = []
    if ours.weights_sha256 and reference.weights_sha256 and ours.weights_sha256 != reference.weights_sha256:
        notes.append(
            f"the weights are from different files, {ours.weights} ({ours.weights_sha256[:12]}…) and "
            f"{reference.weights} ({reference.weights_sha256[:12]}…)"
        )
    return Report(
        model=ours.model or reference.model,
        ours=ours.computed_by,
        reference=reference.computed_by,
        weights=ours.weights or reference.weights,
        input_from=ours.input_from or reference.input_from,
        input_shape=ours.input.shape,
        step=step,
        tolerance=tolerance,
        comparisons=tuple(comparisons),
        missing=tuple(missing),
        notes=tuple(notes),
    )


def _layout_hint(ours: np.ndarray) -> str:
    return "; activations are (N, C, H, W)" if ours.ndim == 4 else ""


def _check_comparable(ours: Recording, reference: Recording) -> None:
    if ours.model and reference.model and ours.model != reference.model:
        raise ValueError(f"{reference.computed_by} is of {reference.model}, which cannot be compared with {ours.model}")
    if ours.input.shape != reference.input.shape or not np.array_equal(
        ours.input.astype(np.float32), reference.input.astype(np.float32), equal_nan=True
    ):
        raise ValueError(
            f"{ours.computed_by} and {reference.computed_by} were given different inputs, of shapes "
            f"{ours.input.shape} and {reference.input.shape}: what they made of them cannot be compared"
        )


def _network(ours: Recording, reference: Recording) -> Network | None:
    name = ours.model or reference.model
    return describe(name) if name in list_models() else None


def _names(values: Mapping[str, np.ndarray], network: Network | None) -> list[str]:
    if network is None:
        return list(values)
    return [name for name in network.checkpoint_names if name in values]


def _guessed_depths(names: list[str]) -> dict[str, int]:
    blocks = [name for name in names if name not in ("stem", "gap", "logits")]
    depth = {name: 1 + _CONVOLUTIONS_IN_A_BLOCK * (place + 1) for place, name in enumerate(blocks)}
    last = max(depth.values(), default=1)
    return depth | {"stem": 1, "gap": last, "logits": last + 1}


def sentence(report: Report) -> str:
    """Returns the verdict in words: that all is well and how well, or where it first is not and by how much."""
    first = report.first_over
    if first is None:
        worst = report.worst
        return (
            f"All {len(report.comparisons)} checkpoints are within tolerance; {worst.name} uses most of it, "
            f"{worst.share:.0%}."
        )
    others = [comparison.name for comparison in report.comparisons if not comparison.passed][1:]
    named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    after = f"; so {'are' if len(others) > 1 else 'is'} {named}" if others else ""
    if first.not_finite_differ:
        return (
            f"{first.name} is the first over tolerance: {first.not_finite_differ} values are NaN or infinite on one "
            f"side only{after}."
        )
    if first.worst is None:
        return f"{first.name} is the first over tolerance: no value is finite on either side{after}."
    place = ", ".join(map(str, first.worst))
    times = f"{first.share:,.0f}" if first.share >= 10 else f"{first.share:.2g}"
    times = times if math.isfinite(first.share) else "infinitely many"
    return (
        f"{first.name} is the first over tolerance, with {times} times what that allows: ‖a − b‖/‖b‖ is "
        f"{first.relative_l2:.1e}, and the worst value, at [{place}], is {first.worst_ours:.6g} instead of "
        f"{first.worst_reference:.6g}{after}."
    )
