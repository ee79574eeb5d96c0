"""What photographs really show: from a table, or from the folders they lie in."""

import csv
import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...model import Model

_NAME_COLUMNS = ("file", "filename", "name", "path", "image")
_CLASS_COLUMNS = ("class_index", "index", "wnid", "label", "category", "class")


class _Classes:
    """From a class as people write it to its row in the classifier."""

    def __init__(self, num_classes: int, categories: Sequence[str] | None, wnids: Sequence[str] | None) -> None:
        self._num_classes = num_classes
        self._by_wnid = {wnid: index for index, wnid in enumerate(wnids or ())}
        self._by_name = {name: index for index, name in enumerate(categories or ())}
        self._ambiguous = {name for name, count in Counter(categories or ()).items() if count > 1}

    def named(self, text: str) -> int | None:
        """Returns the class with this WordNet id or, if only one has it, this name."""
        if text in self._ambiguous:
            return None
        return self._by_wnid.get(text, self._by_name.get(text))

    def parse(self, text: str) -> int:
        """Returns the class with this index, WordNet id or name; raises ValueError if there is none, or several."""
        if text in self._ambiguous:
            raise ValueError(f"several classes are called {text!r}; give the class's index")
        named = self.named(text)
        if named is not None:
            return named
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{text!r} is neither a class's index nor a name or WordNet id that the model knows")
        if int(text) >= self._num_classes:
            raise ValueError(f"there is no class {text}: the model has {self._num_classes}, numbered from 0")
        return int(text)


@dataclass(frozen=True, eq=False)
class Labels:
    """Classes of photographs.

    Args:
        classes: what turns a folder's name into a class.
        table: names of files, or paths below the folder of photographs with ``/``, to classes; None to go by folders.
    """

    classes: _Classes = field(repr=False)
    table: dict[str, int] | None = None

    def of(self, path: str | None, root: str) -> int | None:
        """Returns the class of a photograph, None where nobody said.

        Args:
            path: the photograph's.
            root: the folder that all photographs were looked for in. Without a table, a photograph in a subfolder
                named by a WordNet id or class, as ``n01440764``, belongs to that.
        """
        if path is None:
            return None
        below = Path(os.path.relpath(path, root))
        if self.table is not None:
            return self.table.get(below.as_posix(), self.table.get(below.name))
        return self.classes.named(below.parent.name) if len(below.parts) > 1 else None


def read_labels(file: str | Path | None, model: Model) -> Labels:
    """Reads a table of labels.

    Args:
        file: a CSV file with a photograph's name (or path below their folder) and its class on each line: the class's
            index, WordNet id or name. A first line of headings may name the columns: one of file, filename, name,
            path, image and, the first that is there, of class_index, index, wnid, label, category, class; other columns
            are ignored. Without headings the first two columns are taken. None: labels are the names of subfolders.
        model: whose classes they are.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line cannot be understood; the message names it.
    """
    classes = _Classes(model.num_classes, model.categories, model.wnids)
    if file is None:
        return Labels(classes)
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    rows = csv.reader(io.StringIO(text))
    table: dict[str, int] = {}
    columns: tuple[int, int] | None = None
    for row in rows:
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if columns is None:
            columns = _columns(cells)
            if columns is not None:
                continue
            columns = 0, 1
        try:
            name, label = (cells[column] for column in columns)
            table[Path(name).as_posix()] = classes.parse(label)
        except IndexError as error:
            raise ValueError(f"{path}, line {rows.line_num}: it must hold a photograph's name and its class") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    if not table:
        raise ValueError(f"{path} holds no labels")
    return Labels(classes, table)


def _columns(cells: list[str]) -> tuple[int, int] | None:
    """Returns the columns of names and classes if these are headings."""
    headings = [cell.lower() for cell in cells]
    name = next((headings.index(column) for column in _NAME_COLUMNS if column in headings), None)
    label = next((headings.index(column) for column in _CLASS_COLUMNS if column in headings), None)
    return None if name is None or label is None else (name, label)
