"""For `make site`: what stands under "Example:" in a docstring is shown as code."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Griffe knows sections with the name "Examples" alone."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
