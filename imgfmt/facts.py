"""Facts (SPEC.md section 5.2.1): which values mean the same, and how large they are.

A fact is a name and a text. Different tools write the same thing in different ways (amd64 and
x86_64, 560.35.03 and 560.35.3), so texts are compared in the forms that are made here. None
stands for a text that can't be compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction

Magnitude = tuple[Fraction, ...]

_NUMBERS = re.compile(r"\s*[vV]?([0-9]{1,18}(?:\.[0-9]{1,18})*)(?!\.?[0-9])")
_V = re.compile(r"\Av(?=[0-9])")
_WHOLE_VERSION = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18})*")
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(m|k|[KMGTPE]i?)?B?")
_DIGEST = re.compile(r"(?:.*[@/])?(sha(?:256:[0-9a-f]{64}|512:[0-9a-f]{128}))", re.DOTALL)
_SEPARATORS = re.compile(r"[-_\s]+")
_MAKERS = re.compile(r"\A(?:nvidia |tesla )+")

_ARCHITECTURES = {
    "amd64": "x86_64", "x64": "x86_64", "x86-64": "x86_64",
    "arm64": "aarch64", "ppc64el": "ppc64le", "386": "i686", "i386": "i686",
}  # fmt: skip
_VENDORS = {"genuineintel": "intel", "authenticamd": "amd"}
_UNITS = {
    "m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(1000),
    **{unit: Fraction(1000 ** (power + 1)) for power, unit in enumerate("KMGTPE")},
    **{f"{unit}i": Fraction(1024 ** (power + 1)) for power, unit in enumerate("KMGTPE")},
}  # fmt: skip
_UNLIMITED = Fraction(10**30)


def canonical(fact: str, value: str) -> str | None:
    """The form of a value that all its spellings share; None if it can't be compared."""
    return _FORMS.get(fact, str.strip)(value)


def words(fact: str, value: str) -> Counter[str]:
    """The comma-separated words of a value, in the form that their spellings share."""
    form = _WORD_FORMS.get(fact, str.strip)
    return Counter(filter(None, (form(word) for word in value.split(","))))


def magnitude(fact: str, value: str) -> Magnitude | None:
    """How much a value is: dotted numbers part by part, or of a quantity the one number.

    What follows the dotted numbers does not count. None if there is no number.
    """
    if fact in _QUANTITIES:
        found = _quantity(value)
        return None if found is None else (found,)
    match = _NUMBERS.match(value)
    return None if match is None else _without_zeros(match[1])


def _without_zeros(dotted: str) -> Magnitude:
    """The parts without zeros at the end, so that 1 is as much as 1.0."""
    parts = [Fraction(int(part)) for part in dotted.split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _version(value: str) -> str:
    text = _V.sub("", value.strip().casefold())
    if not _WHOLE_VERSION.fullmatch(text):
        return text
    return ".".join(str(part) for part in _without_zeros(text)) or "0"


def _quantity(value: str) -> Fraction | None:
    """An amount as Kubernetes writes it: 16, 500m, 128Gi, 1.5G. `max` is more than any other."""
    text = value.strip()
    if text == "max":
        return _UNLIMITED
    found = _QUANTITY.fullmatch(text)
    return None if found is None else Fraction(found[1]) * _UNITS[found[2] or ""]


def _quantity_text(value: str) -> str | None:
    found = _quantity(value)
    return None if found is None else str(found)


def _image_digest(value: str) -> str | None:
    """The digest of a container image, without the name of the image and its runtime."""
    found = _DIGEST.fullmatch(value.strip().casefold())
    return None if found is None else found[1]


def _product(word: str) -> str:
    """A GPU's name without its maker's, however it is joined, and without a MIG profile."""
    text = _SEPARATORS.sub(" ", word.casefold()).strip()
    return _MAKERS.sub("", text.partition(" mig ")[0])


def _mig_profile(word: str) -> str:
    return re.sub(r"^mig[-\s]+", "", word.strip().casefold())


def _joined(fact: str) -> Callable[[str], str]:
    """The words of a list in order: the order in which it is written says nothing."""
    return lambda value: ",".join(sorted(words(fact, value).elements()))


def _mapped(names: dict[str, str]) -> Callable[[str], str]:
    return lambda value: names.get(value.strip().casefold(), value.strip().casefold())


_QUANTITIES = frozenset({"container.cpu_limit", "container.memory_limit"})
_WORD_FORMS: dict[str, Callable[[str], str]] = {
    "cpu.features": lambda word: word.strip().casefold(),
    "criu.plugins": lambda word: word.strip().casefold(),
    "gpu.compute_capability": _version,
    "gpu.mig_profiles": _mig_profile,
    "gpu.products": _product,
}
_FORMS: dict[str, Callable[[str], str | None]] = {
    "container.image_id": _image_digest,
    "cpu.arch": _mapped(_ARCHITECTURES),
    "cpu.vendor": _mapped(_VENDORS),
    **dict.fromkeys(
        ("criu.version", "engine.version", "gpu.cuda_version", "gpu.driver_version"), _version
    ),
    **dict.fromkeys(_QUANTITIES, _quantity_text),
    **{fact: _joined(fact) for fact in _WORD_FORMS},
}


def joined(items: Iterable[str]) -> str:
    """The value of a list: its items in order, separated by commas."""
    return ",".join(sorted(items))
