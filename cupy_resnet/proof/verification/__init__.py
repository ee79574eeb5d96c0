"""Verification: a network of ours beside another implementation, layer by layer, and over folders of photographs.

    weights = weights_store.resolve("resnet20-cifar10")
    model, reference = load("resnet20-cifar10"), make_reference("torch", weights)
    report = check(record(model, x), record_reference(reference, weights, x))   # or check_steps(model, recording)
    report.passed, report.first_over, report.to_dict()

`tolerances` says what is allowed, `dumps` how a recording is kept as a folder, `photographs` compares answers.
"""

from .checking import Report, check, check_steps, sentence
from .dumps import check_target, read_dump, write_dump
from .labels import Labels, read_labels
from .metrics import Comparison, compare
from .photographs import PhotoDifference, PhotoReport, compare_photographs, first_photographs
from .recording import Recording, record
from .references import REFERENCES, Reference, make_reference, record_reference
from .running import LAYER_IMAGES, Outcome, random_input, verify
from .tolerances import TOLERANCES, Tolerance, depths, tolerance_for

__all__ = [
    "LAYER_IMAGES",
    "REFERENCES",
    "TOLERANCES",
    "Comparison",
    "Labels",
    "Outcome",
    "PhotoDifference",
    "PhotoReport",
    "Recording",
    "Reference",
    "Report",
    "Tolerance",
    "check",
    "check_steps",
    "check_target",
    "compare",
    "compare_photographs",
    "depths",
    "first_photographs",
    "make_reference",
    "random_input",
    "read_dump",
    "read_labels",
    "record",
    "record_reference",
    "sentence",
    "tolerance_for",
    "verify",
    "write_dump",
]
