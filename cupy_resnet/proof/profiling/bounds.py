"""What the roofline allows a forward pass: a bound for each launch that would be made, known from shapes alone."""

from ...explanation import Explanation
from .results import Roof


def bounds(explanation: Explanation, roof: Roof) -> list[tuple[str, float]]:
    """Returns what bounds each step and the least time in µs that it allows, as `Roof.bound` does.

    A step is a launch as `explain` tells it. Operations that one kernel computes are one step: its inputs, filters and
    outputs are moved once each, what stays within it is not, and what one of them moves may be hidden behind the
    arithmetic of another. The sum over all steps is what the roofline allows the pass.

    Args:
        explanation: of a network and a shape.
        roof: of the device, for the precision of `explanation`.
    """
    return [roof.bound(step.record.flops, step.record.nbytes) for step in explanation]
