"""Packs libraries for a machine without a network into one file that ``beside_torch.py`` unpacks.

    python tests/ecosystem/gpu/pack.py libs.tar.xz

For Python 3.12 on Linux. Left out is what such a machine has (torch, numpy) and what is large and not used here.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# The newest torchtitan that runs with torch 2.11 is 0.2.2; 0.3 imports names that came later.
PACKAGES = (
    "accelerate==1.15.0 transformers==5.22.2 tokenizers==0.23.3 safetensors==0.8.0 "
    "huggingface_hub==1.33.0 regex pyyaml tqdm packaging filelock fsspec psutil httpx httpcore h11 anyio "
    "idna certifi sniffio typer click rich markdown-it-py mdurl pygments shellingham annotated-doc "
    "typing_extensions torchtitan==0.2.2 torchao==0.18.0 torchdata==0.11.0 tyro docstring_parser "
    "typeguard einops "
)
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheels, files = Path(folder) / "wheels", Path(folder) / "files"
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--no-deps"]
        subprocess.run(
            [*command, "--python-version", "3.12", *platforms, "--dest", str(wheels), *PACKAGES.split()],
            check=True,
        )
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as content:
                content.extractall(files)
        with tarfile.open(sys.argv[1], "w:xz", preset=9) as archive:
            archive.add(files, arcname=".")


if __name__ == "__main__":
    main()
