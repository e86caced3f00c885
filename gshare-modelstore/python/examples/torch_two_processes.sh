#!/usr/bin/env bash
# Installs PyTorch and NumPy into target/torch-venv (once, some gigabytes), builds the store, and runs torch_two_processes.py.
# PYTHON names an interpreter that has them already.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$PWD/target/torch-venv/bin/python
    if ! "$PYTHON" -c 'import torch, numpy' 2>/dev/null; then
        python3 -m venv target/torch-venv
        "$PYTHON" -m pip install --quiet torch numpy
    fi
fi
profile=${PROFILE:-release}
flag=$([ "$profile" = release ] && echo --release || true)
cargo build --quiet $flag -p gshare-cli --bin gshare
cargo build --quiet $flag -p gshare-store-c
GSHARE_COMMAND=$PWD/target/$profile/gshare GSHARE_STORE_LIBRARY=$PWD/target/$profile/libgshare_store.so \
    "$PYTHON" gshare-modelstore/python/examples/torch_two_processes.py
