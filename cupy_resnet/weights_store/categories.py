"""Names of classes: from lists, from files, and ImageNet's own."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..resources import folder

IMAGENET = "imagenet"
"""What `categories` may be instead of a list or file: the 1000 classes that travel with the package."""

Names = tuple[list[str], list[str] | None]
"""Categories by index, and WordNet ids by index or None."""

_INDEX_COLUMNS = ("class_index", "index", "id")
_NAME_COLUMNS = ("name", "category", "label", "class")


def imagenet_classes() -> list[tuple[int, str, str]]:
    """Returns (class index, WordNet id, name) of ImageNet-1k's 1000 classes, in the order of the index.

    Names are torchvision's. Where two would read alike, index and WordNet id tell the classes apart.
    """
    with (folder("weights") / "imagenet_classes.csv").open(encoding="utf-8", newline="") as file:
        return [(int(row["class_index"]), row["wnid"], row["name"]) for row in csv.DictReader(file)]


def read_categories(categories: str | Path | Iterable[str]) -> Names:
    """Reads the names of classes.

    Args:
        categories: the names in the order of their index; or ``"imagenet"``; or a file: ``.txt``, one name a line;
            ``.json``, a list of names, or an object from indices to names or to [WordNet id, name] pairs; ``.csv``
            with a header that has ``class_index`` and ``name``, and may have ``wnid``.

    Raises:
        CheckpointError: the file holds something else, or indices that are not 0, 1, 2, …
        FileNotFoundError: there is no such file.
        TypeError: something else than names.
    """
    if isinstance(categories, str) and categories == IMAGENET:
        classes = imagenet_classes()
        return [name for _, _, name in classes], [wnid for _, wnid, _ in classes]
    if isinstance(categories, str | Path):
        return _read_file(Path(categories).expanduser())
    names = list(categories)
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"categories must be names, but that of class {index} is a {type(name).__name__}")
    return [str(name) for name in names], None


def _read_file(path: Path) -> Names:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of categories {path}")
    readers = {".txt": _from_text, ".json": _from_json, ".csv": _from_csv}
    if path.suffix.lower() not in readers:
        raise CheckpointError(f"categories: {path} must end in {', '.join(readers)}")
    try:
        return readers[path.suffix.lower()](path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CheckpointError(f"categories: {path} cannot be read: {error}") from error


def _from_text(text: str) -> Names:
    names = [line.strip() for line in text.rstrip().splitlines()]
    if "" in names:
        raise ValueError(f"line {names.index('') + 1} is empty, one name a line is expected")
    return names, None


def _from_json(text: str) -> Names:
    content = json.loads(text)
    if isinstance(content, dict):
        if not all(key.isdecimal() for key in content):
            raise ValueError("its keys must be class indices")
        return _by_index((int(index), entry) for index, entry in content.items())
    if not isinstance(content, list):
        raise ValueError("a list of names, or an object from indices to names, is expected")
    return _by_index(enumerate(content))


def _from_csv(text: str) -> Names:
    reader = csv.DictReader(text.splitlines())
    columns = reader.fieldnames or ()
    index_column = next((column for column in _INDEX_COLUMNS if column in columns), None)
    name_column = next((column for column in _NAME_COLUMNS if column in columns), None)
    if index_column is None or name_column is None:
        raise ValueError(f"its header must name class_index and name, but is: {','.join(columns)}")
    rows: list[Mapping[str, str]] = list(reader)
    if "wnid" in columns:
        return _by_index((int(row[index_column]), [row["wnid"], row[name_column]]) for row in rows)
    return _by_index((int(row[index_column]), row[name_column]) for row in rows)


def _by_index(entries: Iterable[tuple[int, Any]]) -> Names:
    """Sorts (index, name) or (index, [WordNet id, name]) entries, which must be all of one kind."""
    ordered = sorted(entries, key=lambda entry: entry[0])
    if [index for index, _ in ordered] != list(range(len(ordered))):
        raise ValueError("class indices must be 0, 1, 2, … without gaps and repetitions")
    values = [value for _, value in ordered]
    if all(isinstance(value, str) for value in values):
        return values, None
    if all(isinstance(v, list) and len(v) == 2 and all(isinstance(part, str) for part in v) for v in values):
        return [name for _, name in values], [wnid for wnid, _ in values]
    raise ValueError("every class must be a name, or every class a [WordNet id, name] pair")
