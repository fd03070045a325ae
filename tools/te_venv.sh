#!/bin/sh
# An environment of its own with CUDA torch and Transformer Engine, for `make test-te`: tools/te_venv.sh [FOLDER]
# It needs nvcc of CUDA 13 (CUDA_HOME), a C++ compiler and 8 GB of disk, and no GPU. Compiling takes 15 minutes of
# two cores; MAX_JOBS bounds them. A folder that is complete is left alone.
set -eu
cd "$(dirname "$0")/.."
venv=${1:-build/te-venv}
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" MAX_JOBS="${MAX_JOBS:-2}"
[ ! -f "$venv/installed" ] || exit 0
[ -x "$CUDA_HOME/bin/nvcc" ] || { echo "$CUDA_HOME/bin/nvcc: not found; install CUDA 13's compiler or set CUDA_HOME" >&2; exit 1; }

"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip"
# what torch was pinned to has no CUDA here; everything else stays as the tests ran with it
grep -v '^torch==' constraints.txt > "$venv/constraints.txt"
echo "torch==2.14.1" >> "$venv/constraints.txt"
$pip install --quiet --constraint "$venv/constraints.txt" torch setuptools wheel pybind11 ninja packaging numpy
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# cuDNN's and NCCL's headers come with torch's own dependencies
CPATH=$(find "$site/nvidia" -maxdepth 2 -name include | tr '\n' ':')$CUDA_HOME/include
[ ! -d "$CUDA_HOME/include/cccl" ] || CPATH="$CPATH:$CUDA_HOME/include/cccl"
export CPATH NVTE_FRAMEWORK=pytorch
# --no-build-isolation: compiled against this very torch
$pip install --quiet --constraint "$venv/constraints.txt" --no-build-isolation \
    'transformer-engine[core_cu13,pytorch]==2.11.0'
$pip install --quiet --constraint "$venv/constraints.txt" --editable '.[hf,data,dev]'
"$venv/bin/python" -c 'import transformer_engine.pytorch; print("transformer_engine", transformer_engine.__version__)'
touch "$venv/installed"
