"""Packages and extension modules; everything static is in pyproject.toml.

`trie/` and `codecs/` are top-level folders that import as `kvstore.trie` and `kvstore.codecs`. The map below
makes every build independent of the committed symlinks kvstore/trie and kvstore/codecs; the symlinks make
in-tree imports, type checkers and editors work.
"""

import os
import threading
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup
from setuptools.errors import CompileError, ExecError

SANITIZE = os.environ.get("KVSTORE_SANITIZE") == "1"
COMPILED_APART = os.environ.get("KVSTORE_COMPILED_APART") == "1"  # `make setup` compiles while packages are installed
# Sums of floating point numbers are part of formats: a product must not be fused into them.
# pybind11 hides symbols and leaves debug symbols out.
COMPILE = ["-Wextra", "-ffp-contract=off"]
LINK = []
if SANITIZE:
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    COMPILE += [*checks, "-g", "-O1", "-fno-omit-frame-pointer"]
    LINK += checks
else:
    COMPILE.append("-O3")
# The bindings only hand on what they are given; but they are two thirds of what the compiler does, all templates. With
# -O1 it takes three quarters of the time for them.
BINDINGS = ["-O1"]


# What extensions share: every part with what it stands on.
CPU = ("common/cpu.cc",)
XXH3 = ("xxh3/xxh3.cc",)
RANS = ("rans/rans.cc", *CPU)
MODEL = ("predictive/model.cc", *RANS)
TRIE = ("trie/trie.cc", "trie/read.cc", "trie/bits.cc", "trie/restore.cc")
CATALOG = ("catalog/catalog.cc", "catalog/parents.cc", *XXH3)
STEPS = ("donor/rows.cc", "donor/steps/walk.cc", "donor/steps/encode.cc", "donor/steps/decode.cc")
HEADERS = sorted(path.as_posix() for path in Path("csrc").rglob("*.h"))


def extension(name: str, *sources: str) -> Pybind11Extension:
    return Pybind11Extension(
        name,
        [f"csrc/{source}" for source in sources],
        include_dirs=["csrc"],
        cxx_std=17,
        extra_compile_args=[*COMPILE],  # pybind11 writes into it
        extra_link_args=[*LINK],
        # Rebuild when any header changes: distutils only looks at the sources and this list.
        depends=HEADERS,
    )


def packages() -> list[str]:
    """Every folder with an __init__.py; those of trie/ and codecs/ once, though the symlinks show them twice."""
    found = find_packages(include=["kvstore*"], exclude=["kvstore.trie*", "kvstore.codecs*"])
    for folder in ("trie", "codecs"):
        found += [f"kvstore.{folder}", *(f"kvstore.{folder}.{name}" for name in find_packages(folder))]
    return found


class parallel_build_ext(build_ext):
    """Compile the extension modules side by side, and each source once, however many of them it is a part of."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = min(4, os.cpu_count() or 1)

    def build_extensions(self) -> None:
        compile_sources = self.compiler.compile
        locks = {source: threading.Lock() for extension in self.extensions for source in extension.sources}
        objects: dict[str, list[str]] = {}

        def compile_once(sources, **options):
            for source in sources:
                with locks[source]:  # two modules would write the same object file at once
                    if source not in objects:
                        more = BINDINGS if source.startswith("csrc/bindings/") else []
                        flags = {"extra_postargs": [*options["extra_postargs"], *more]}
                        objects[source] = compile_sources([source], **options | flags)
            return [path for source in sources for path in objects[source]]

        self.compiler.compile = compile_once
        try:
            super().build_extensions()
        except (CompileError, ExecError) as error:
            raise SystemExit(
                f"error: kvstore could not be compiled ({error}). It needs a C++17 compiler and the headers of Python: "
                "`apt-get install g++ python3-dev` or the like; CC and CXX name a compiler that is elsewhere"
            ) from None


setup(
    packages=packages(),
    package_dir={"kvstore": "kvstore", "kvstore.trie": "trie", "kvstore.codecs": "codecs"},
    package_data={"": ["py.typed", "*.pyi", "*.bin", "*.css", "*.js"]},
    ext_modules=[]
    if COMPILED_APART
    else [
        extension("kvstore.trie._trie", "bindings/trie.cc", *TRIE, *CPU),
        extension("kvstore.trie._content", "bindings/content.cc", "content/content.cc", "content/find.cc", *TRIE, *CPU),
        extension("kvstore.core._sums", "bindings/sums.cc", *XXH3, *CPU),
        extension("kvstore.read._tensors", "bindings/tensors.cc", *CPU),
        extension("kvstore.tiers.disk._catalog", "bindings/catalog.cc", *CATALOG, *CPU),
        extension("kvstore.tiers.disk._files", "bindings/files.cc", "files/write.cc", "files/read.cc", *CPU),
        extension(
            "kvstore.codecs._native",
            *("bindings/native.cc", "common/rows.cc", "splitzip/splitzip.cc", "entropy/entropy.cc", *XXH3, *RANS),
        ),
        extension("kvstore.codecs.aqua._aqua", "bindings/aqua.cc", "aqua/aqua.cc", "aqua/candidates.cc", *CPU),
        extension("kvstore.codecs.rans._rans", "bindings/rans.cc", *RANS),
        extension(
            "kvstore.codecs.predictive._predict",
            *("bindings/predict.cc", "predictive/predictive.cc", "predictive/sections.cc"),
            *("predictive/float8/float8.cc", "predictive/wide.cc"),
            *MODEL,
        ),
        extension(
            "kvstore.codecs.donor._donor",
            *("bindings/donor.cc", "donor/donor.cc", "donor/rows.cc", "predictive/sections.cc", *MODEL),
        ),
        extension(
            "kvstore.codecs.donor._donor_groups",
            *("bindings/donor_groups.cc", "donor/groups.cc", "donor/rows.cc", "levels/tiles.cc", "levels/model.cc"),
            *("predictive/sections.cc", *MODEL),
        ),
        extension("kvstore.codecs.donor._donor_steps", "bindings/donor_steps.cc", *STEPS, *RANS),
        extension(
            "kvstore.codecs.predictive._lossy",
            *("bindings/lossy.cc", "bindings/lossy_encode.cc", "lossy/lossy.cc", "lossy/model.cc"),
            *("lossy/encode/encoder.cc", "lossy/encode/encode.cc", *MODEL),
        ),
        extension(
            "kvstore.codecs.predictive._levels",
            *("bindings/levels.cc", "levels/levels.cc", "levels/tiles.cc", "levels/model.cc"),
            *("predictive/sections.cc", *MODEL),
        ),
    ],
    cmdclass={"build_ext": parallel_build_ext},
)
