"""Instructions of x86 CPUs, under the names of /proc/cpuinfo, and where `cpuinfo.img` has them.

Only those that a program can have chosen at its start because they were there, as the C library
does: a restored process goes on using them. Left out is what a kernel may hide from /proc/cpuinfo
though the CPU has it, since the machine that took a snapshot must always fit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_WORDS = {
    0: {8: "cx8", 15: "cmov", 19: "clflush", 23: "mmx", 24: "fxsr", 25: "sse", 26: "sse2"},
    1: {22: "mmxext", 27: "rdtscp"},
    4: {
        0: "pni", 1: "pclmulqdq", 9: "ssse3", 12: "fma", 13: "cx16", 19: "sse4_1", 20: "sse4_2",
        22: "movbe", 23: "popcnt", 25: "aes", 26: "xsave", 28: "avx", 29: "f16c",
    },
    6: {5: "abm", 6: "sse4a", 11: "xop", 16: "fma4", 21: "tbm"},
    9: {
        3: "bmi1", 5: "avx2", 8: "bmi2", 16: "avx512f", 17: "avx512dq", 18: "rdseed", 19: "adx",
        21: "avx512ifma", 23: "clflushopt", 24: "clwb", 26: "avx512pf", 27: "avx512er",
        28: "avx512cd", 29: "sha_ni", 30: "avx512bw", 31: "avx512vl",
    },
    11: {
        1: "avx512vbmi", 6: "avx512_vbmi2", 8: "gfni", 9: "vaes", 10: "vpclmulqdq",
        11: "avx512_vnni", 12: "avx512_bitalg", 14: "avx512_vpopcntdq", 22: "rdpid",
    },
    18: {22: "amx_bf16", 23: "avx512_fp16", 24: "amx_tile", 25: "amx_int8"},
}  # fmt: skip
"""By the number of the word in CRIU's `capability`, then by bit; a word is a register of CPUID."""

_WORD_COUNTS = {1: 12, 2: 19}
"""How many words `capability` has, by `capability_ver`."""

_KNOWN = frozenset(name for bits in _WORDS.values() for name in bits.values())


def features_of_words(version: int, words: Sequence[int]) -> str | None:
    """Names, ascending and separated by commas. None for a layout that is not known here."""
    if len(words) != _WORD_COUNTS.get(version):
        return None
    names = [
        name
        for word, bits in _WORDS.items()
        if word < len(words)
        for bit, name in bits.items()
        if words[word] >> bit & 1
    ]
    return ",".join(sorted(names))


def features_of_flags(flags: Iterable[str]) -> str:
    """The same of the `flags` of /proc/cpuinfo."""
    return ",".join(sorted(_KNOWN.intersection(flags)))
