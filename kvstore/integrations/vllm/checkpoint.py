"""The fingerprint of the weights that vLLM loaded, from the files that it loaded them from.

A loaded model does not tell: on a CPU vLLM packs its weights and drops them, and it fuses layers.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from kvstore.core.fingerprints import SAMPLED
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.fingerprint import sampled_digest

FORMATS = ("auto", "hf", "safetensors")  # of `--load-format`: those that read these files


def checkpoint_folder(model: str, revision: str | None, download: str | None) -> Path:
    """Return the folder of a checkpoint that vLLM has loaded.

    Args:
        model: a folder, or the name of a model in the cache of huggingface_hub.
        revision: of that model.
        download: the folder of that cache; None: the default.

    Raises:
        UnsupportedModel: there is no such folder.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"{model}: its checkpoint is not found on this machine ({error}); name a folder"
        ) from error


def checkpoint_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a checkpoint: SHA-256 over name, shape, dtype and 256 evenly spread elements of every
    tensor, wherever the file lies that has it.

    Raises:
        UnsupportedModel: the folder has no safetensors.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"a": torch.ones(3)}, f"{folder}/model.safetensors")
        ...     checkpoint_fingerprint(Path(folder))[:15]
        'sampled-sha256:'
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder}: it has no *.safetensors, and the store knows a model by these; convert it")
    tensors = []
    for file in files:
        with safe_open(str(file), framework="pt") as opened:  # maps the file: only what is sampled is read
            tensors += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
    return SAMPLED + sampled_digest(sorted(tensors, key=lambda pair: pair[0]))
