"""The error for weights that cannot be had, and the advice it gives."""

from collections.abc import Sequence


class WeightsUnavailableError(RuntimeError):
    """Weights were asked for that cannot be had here and now; the message says why and what can be done."""


class NoWeightsError(ValueError):
    """Nobody said which weights, and there are none for this network; the message says what can be done."""


def unavailable(model: str, name: str, reason: str, alternatives: Sequence[str]) -> WeightsUnavailableError:
    """Returns the error for torchvision's weights `name` of `model`.

    Args:
        model: the network.
        name: torchvision's name of the weights.
        reason: what stands in the way.
        alternatives: models whose weights come with the package.
    """
    return WeightsUnavailableError(
        f"torchvision's {name} weights of {model} cannot be had: {reason}.\n"
        "Three ways to get weights:\n"
        "  1. pip install 'cupy-resnet[torch]' and run this once with internet access: they are downloaded, checked\n"
        "     and converted once; after that neither torch nor internet access is needed\n"
        f"  2. where both exist, run: cupy-resnet convert {model} --weights {name} --output {model}.safetensors\n"
        f'     and pass the file here: weights="{model}.safetensors"\n'
        "  3. pass weights of your own: a .safetensors, .npz, .pth or .json file, or a state dict"
        + advice(alternatives)
    )


def advice(alternatives: Sequence[str]) -> str:
    """Returns a line that names the models that work at once, empty if there are none."""
    if not alternatives:
        return ""
    named = " or ".join(f'model="{name}"' for name in alternatives)
    return f"\n{named} works now, with weights that come with the package."
