#!/usr/bin/env bash
# Makes the virtual environment DIR in which speculators 0.9.0 and specforge 0.2.0 train on a CPU, unless it is there and complete.
# About 75 s and 2.5 GB; for tests only. One maker at a time; a half-made environment is made afresh.
# Usage: setup.sh DIR [PYTHON 3.11]
set -euo pipefail
dir=${1:?usage: setup.sh DIR [PYTHON]}
python=${2:-python3.11}
mkdir -p "$(dirname "$dir")"
exec 9>"$(dirname "$dir")/.$(basename "$dir").lock"
flock 9
[ -e "$dir/.complete" ] && exit 0
rm -rf "$dir"
"$python" -m venv "$dir"
# Without bytecode of all the modules that nobody imports: that is a quarter of the work.
pip() { "$dir/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install --no-compile torch==2.13.0 transformers==5.19.0 tokenizers==0.23.3 datasets==5.1.0 accelerate==1.15.0 safetensors==0.8.0 numpy==2.4.6 \
  triton==3.9.0 aiohttp click openai openai-harmony pydantic pydantic-settings typer rich loguru omegaconf psutil protobuf scipy httpx \
  requests tqdm
# Their own requirements would bring CUDA builds and torchaudio.
pip install --no-compile --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0
"$dir/bin/python" -c 'import speculators, specforge, torch'
touch "$dir/.complete"
