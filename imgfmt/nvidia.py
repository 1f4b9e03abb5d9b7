"""NVIDIA Snapshot's `manifest.yaml`: facts about the machine and container that were captured.

Takes the parsed mapping; parsing YAML is the caller's. The manifest has no version, and its
writer leaves out what it could not read, so every field may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgfmt.errors import InvalidImage
from imgfmt.facts import joined

MANIFEST_FILE = "manifest.yaml"

_MAX_TEXT_CHARACTERS = 1024
_MAX_GPUS = 1024
_MAX_LIST_CHARACTERS = 16 << 10
_SIMPLE_FACTS = {
    "cpu.arch": ("host", "cpuArch"),
    "kernel.release": ("host", "kernelVersion"),
    "container.image": ("k8s", "image"),
    "container.image_id": ("k8s", "imageId"),
    "container.cpu_limit": ("k8s", "cpuLimit"),
    "container.memory_limit": ("k8s", "memoryLimit"),
    "gpu.driver_version": ("cudaRestore", "sourceDriverVersion"),
}


def facts_of_manifest(manifest: Mapping[str, object]) -> dict[str, str]:
    """Provenance: fact to value. A fact that the manifest does not tell is left out.

    `gpu.products` and `gpu.mig_profiles` name one GPU each, separated by commas and sorted: the
    order of GPUs is no fact. They are left out unless every GPU has one. Pod, node and GPU ids are
    never facts: they tell where a snapshot was taken, not where it can run. Raises InvalidImage
    for a manifest of another shape.
    """
    facts = {
        fact: text
        for fact, (section, key) in _SIMPLE_FACTS.items()
        if (text := _text(_section(manifest, section), key)) is not None
    }
    cuda = _section(manifest, "cudaRestore")
    gpus = [gpu for gpu in _items(cuda, "sourceGpus") if isinstance(gpu, Mapping)]
    n_gpus = len(gpus) or len(_items(cuda, "sourceGpuUuids"))
    if n_gpus:
        facts["gpu.count"] = str(n_gpus)
    for fact, key in (("gpu.products", "productName"), ("gpu.mig_profiles", "migProfile")):
        texts = [text for gpu in gpus if (text := _text(gpu, key)) is not None]
        if texts and len(texts) == n_gpus:
            facts[fact] = joined(texts)
            if len(facts[fact]) > _MAX_LIST_CHARACTERS:
                raise InvalidImage(f"{MANIFEST_FILE}: the {key} of all GPUs are too long")
    return facts


def _section(manifest: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = manifest.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InvalidImage(f"{MANIFEST_FILE}: {name} is not a mapping")
    return found


def _items(section: Mapping[str, object], key: str) -> list[object]:
    found = section.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise InvalidImage(f"{MANIFEST_FILE}: {key} is not a list")
    if len(found) > _MAX_GPUS:
        raise InvalidImage(f"{MANIFEST_FILE}: {key} has more than {_MAX_GPUS} items")
    return found


def _text(section: Mapping[str, object], key: str) -> str | None:
    found = section.get(key)
    if found is None or found == "":
        return None
    if isinstance(found, int) and not isinstance(found, bool) and found.bit_length() < 64:
        found = str(found)  # what YAML may make of an unquoted `4`
    if not isinstance(found, str):
        raise InvalidImage(f"{MANIFEST_FILE}: {key} is not text: put it in quotes")
    if len(found) > _MAX_TEXT_CHARACTERS or not found.isprintable():
        raise InvalidImage(
            f"{MANIFEST_FILE}: {key} is not one line of {_MAX_TEXT_CHARACTERS} characters"
        )
    return found
