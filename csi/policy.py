"""Which namespace may mount which references. What the administrator does not list is refused."""

from __future__ import annotations

from csi.config import ALL, PolicyConfig
from imgfmt.errors import AccessDenied
from imgfmt.reference import ImageRef

_WITH_KEY = "policy.namespaces"


def check_allowed(policy: PolicyConfig, namespace: str | None, reference: ImageRef) -> None:
    """Raise AccessDenied unless Pods of `namespace` may mount `reference`.

    A name with a digest passes by its name: that the digest was ever called so is for the store to
    say, see `needs_proof`.
    """
    if policy.single_tenant:
        return
    if namespace is None:
        raise AccessDenied(
            f"image {reference}: the call does not say which namespace the Pod is in; set"
            " podInfoOnMount: true in the CSIDriver object, or policy.singleTenant"
        )
    if not any(_matches(prefix, reference) for prefix in _prefixes(policy, namespace)):
        raise AccessDenied(
            f"namespace {namespace} may not mount image {reference}; an administrator can list it"
            f" under {_WITH_KEY}.{namespace} in the driver's configuration"
        )


def needs_proof(policy: PolicyConfig, namespace: str | None, reference: ImageRef) -> bool:
    """Whether a digest has to be one that the name has or had, for the name to allow it."""
    if policy.single_tenant or not reference.by_digest:
        return False
    return ALL not in _prefixes(policy, namespace or "")


def _prefixes(policy: PolicyConfig, namespace: str) -> tuple[str, ...]:
    return policy.namespaces.get(namespace, ()) + policy.namespaces.get(ALL, ())


def _matches(prefix: str, reference: ImageRef) -> bool:
    if prefix == ALL:
        return True
    name = reference.name
    if name is None:
        return False
    if prefix.endswith(ALL):
        return name.startswith(prefix[:-1])
    stem, colon, tag = prefix.partition(":")
    if colon:
        return name == stem and not reference.by_digest and reference.effective_tag == tag
    stem = stem.rstrip("/")
    return name == stem or name.startswith(f"{stem}/")
