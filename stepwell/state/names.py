"""Dotted names: which are asked for, and what saved names are called in the target."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from stepwell.errors import ConfigError

Rename = Mapping[str, str] | Callable[[str], str | None] | None


class KeyFilter:
    """Patterns (fnmatch) on dotted names, with or without the part in front. A name below a match matches, too."""

    def __init__(self, patterns: str | Sequence[str]) -> None:
        texts = [patterns] if isinstance(patterns, str) else list(patterns)
        self.everything = "*" in texts
        self._texts = texts
        self._matchers = [re.compile(fnmatch.translate(text)).match for text in texts]

    def __call__(self, part: str, name: str) -> bool:
        if self.everything:
            return True
        full = f"{part}.{name}" if name else part
        return any(match(name) or match(full) or match(part) for match in self._matchers)

    def unmatched(self, names: Iterable[tuple[str, str]]) -> list[str]:
        """The patterns that match none of these (part, dotted name)."""
        known = {text for part, name in names for text in (part, name, f"{part}.{name}")}
        return [
            text
            for text, match in zip(self._texts, self._matchers, strict=True)
            if text not in known and not any(map(match, known))
        ]


def renamer(rename: Rename) -> Callable[[str], str | None] | None:
    """The function from a saved dotted name (inside its part) to the target's; None where it is left out.

    A mapping's rules are tried in order, the first that fits is used: `{"module.": ""}` replaces a prefix,
    `{"layers.*.w": "blocks.*.weight"}` a pattern, in which each * carries over.
    """
    if rename is None:
        return None
    if not isinstance(rename, Mapping):
        return rename
    rules = [_rule(str(old), str(new)) for old, new in rename.items()]

    def apply(name: str) -> str | None:
        for rule in rules:
            new = rule(name)
            if new is not None:
                return new
        return name

    return apply


def _rule(old: str, new: str) -> Callable[[str], str | None]:
    if "*" not in old and "?" not in old and "[" not in old:
        return lambda name: new + name[len(old) :] if name.startswith(old) else None
    if new.count("*") > old.count("*"):
        raise ConfigError(f"The rename rule {old!r}: {new!r} has more * on the right than on the left")
    pattern = re.compile("(.*)".join(_translated(piece) for piece in old.split("*")), re.DOTALL)
    pieces = new.split("*")

    def apply(name: str) -> str | None:
        match = pattern.fullmatch(name)
        if match is None:
            return None
        stars = [*match.groups(), ""]
        return "".join(piece + star for piece, star in zip(pieces, [*stars[: len(pieces) - 1], ""], strict=True))

    return apply


def _translated(piece: str) -> str:
    """A piece of a pattern without *, as a regular expression."""
    text = fnmatch.translate(piece)
    return text.removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
