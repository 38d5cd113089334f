"""Packages and extension modules; everything static is in pyproject.toml.

`trie/` and `codecs/` are top-level folders that import as `kvstore.trie` and `kvstore.codecs`. The map below
makes every build independent of the committed symlinks kvstore/trie and kvstore/codecs; the symlinks make
in-tree imports, type checkers and editors work.
"""

import os

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

SANITIZE = os.environ.get("KVSTORE_SANITIZE") == "1"
# Sums of floating point numbers are part of formats: a product must not be fused into them.
COMPILE = ["-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off"]
LINK = []
if SANITIZE:
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    COMPILE += [*checks, "-g", "-O1", "-fno-omit-frame-pointer"]
    LINK += checks
else:
    COMPILE += ["-O3", "-g0"]


CODECS = ("kvcopy.cc", "splitzip.cc", "entropy.cc", "rans.cc")


def extension(name: str, *sources: str) -> Pybind11Extension:
    return Pybind11Extension(
        name,
        [f"csrc/{source}" for source in sources],
        include_dirs=["csrc"],
        cxx_std=17,
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
        # Rebuild when any header changes: distutils only looks at the sources and this list.
        depends=[f"csrc/{header}" for header in sorted(os.listdir("csrc")) if header.endswith(".h")],
    )


def packages() -> list[str]:
    """Every folder with an __init__.py; those of trie/ and codecs/ once, though the symlinks show them twice."""
    found = find_packages(include=["kvstore*"], exclude=["kvstore.trie*", "kvstore.codecs*"])
    for folder in ("trie", "codecs"):
        found += [f"kvstore.{folder}", *(f"kvstore.{folder}.{name}" for name in find_packages(folder))]
    return found


class parallel_build_ext(build_ext):
    """Compile the extension modules side by side."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = min(4, os.cpu_count() or 1)


setup(
    packages=packages(),
    package_dir={"kvstore": "kvstore", "kvstore.trie": "trie", "kvstore.codecs": "codecs"},
    package_data={"kvstore": ["py.typed"], "kvstore.trie": ["*.pyi"], "kvstore.codecs": ["*.pyi", "*.bin"]},
    ext_modules=[
        extension("kvstore.trie._trie", "trie.cc", "trie_read.cc", "trie_bits.cc", "cpu.cc", "bindings_trie.cc"),
        extension("kvstore.trie._content", "content.cc", "content_find.cc", "bindings_content.cc"),
        extension("kvstore.codecs._native", *CODECS, "cpu.cc", "bindings_codecs.cc"),
        extension("kvstore.codecs._rans", "rans.cc", "cpu.cc", "bindings_rans.cc"),
        extension(
            "kvstore.codecs._predict", "predict.cc", "predict_model.cc", "rans.cc", "cpu.cc", "bindings_predict.cc"
        ),
        extension("kvstore.codecs._donor", "donor.cc", "predict_model.cc", "rans.cc", "cpu.cc", "bindings_donor.cc"),
        extension("kvstore.codecs._donor_steps", "donor_steps.cc", "rans.cc", "cpu.cc", "bindings_donor_steps.cc"),
        extension(
            "kvstore.codecs._lossy",
            *("lossy.cc", "lossy_model.cc", "predict_model.cc", "rans.cc", "cpu.cc", "bindings_lossy.cc"),
        ),
    ],
    cmdclass={"build_ext": parallel_build_ext},
)
