"""One wording for names that do not exist."""

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> str:
    """Returns a sentence that says `name` is no `kind`, suggests the closest names and lists all valid ones."""
    names = list(valid)
    wanted = str(name).lower().replace("-", "").replace("_", "")
    folded = {valid_name.lower().replace("-", "").replace("_", ""): valid_name for valid_name in names}
    matches = [wanted] if wanted in folded else difflib.get_close_matches(wanted, folded, n=3, cutoff=0.7)
    close = [folded[match] for match in matches]
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"unknown {kind} {name!r}.{hint} Valid: {', '.join(names)}"
