#!/bin/sh
# Makes (or completes) one of the Makefile's environments:
#
#     .ci/venv.sh DIRECTORY MEGATRON_CORE_VERSION PYTHON_VERSION [newer [OLD_VERSION]]
#
# With `none` for Megatron-core, it gets what builds the documentation, and no torch.
# With `newer`, a newer Python will do where that version is not found. A Megatron-core of
# OLD_VERSION comes into a directory of its own, for tests. The environment has PYTHON,
# TORCH, TORCH_INDEX and ALLOW_CUDA_TORCH, which the Makefile explains. What an earlier run left is
# completed, not made anew: pip passes over what is installed.
set -eu

venv=$1 mcore=$2 wanted=$3 newer=${4:-} old=${5:-}
python=${PYTHON:-} torch=${TORCH:-torch} torch_index=${TORCH_INDEX:-}
in_venv=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'megapg: %s\n' "$*" >&2; }
stop() { say "$@"; exit 1; }
pip() { "$in_venv" -m pip "$@"; }  # given -qq below: its errors show, its remarks don't

# --- which Python ------------------------------------------------------------------------------

# "3.12 /usr/bin/python3.12"; fails where the command is absent or is a shim of nothing.
describe() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null; }

at_least_wanted() { "$1" -c "import sys; sys.exit('%d.%02d' % sys.version_info[:2] < '$wanted')" 2>/dev/null; }

# One a line, so that paths may have spaces.
candidates() {
    printf '%s\n' python3 "python$wanted"
    for root in "${PYENV_ROOT:-${HOME:-}/.pyenv}" "$(command -v pyenv >/dev/null && pyenv root 2>/dev/null)"; do
        ls "$root/versions/$wanted".*/bin/"python$wanted" 2>/dev/null || true
    done
    uv python find "$wanted" 2>/dev/null || true
}

find_wanted() {
    candidates | while IFS= read -r candidate; do
        found=$(describe "$candidate") || continue
        case $found in "$wanted "*) echo "${found#* }"; break ;; esac
    done
}

find_newer() {
    for candidate in python3 python3.12 python3.13 python3.14; do
        if at_least_wanted "$candidate"; then
            found=$(describe "$candidate")
            echo "${found#* }"
            break
        fi
    done
}

choose_python() {
    if [ -n "$python" ]; then
        found=$(describe "$python") || stop "$python does not run: name another Python."
        at_least_wanted "$python" || stop "$python is Python ${found%% *}; $venv needs $wanted or newer."
        python=${found#* }
        return
    fi
    python=$(find_wanted)
    [ -z "$python" ] || return 0
    seen=$(describe python3) || seen="absent"
    if [ -z "$newer" ]; then
        stop "Megatron-core $mcore needs python$wanted, and none was found (python3 is ${seen})." \
            "Install python$wanted, or name it: make test-newest PYTHON312=/path/to/python$wanted"
    fi
    python=$(find_newer)
    [ -n "$python" ] || stop "megapg needs Python $wanted or newer, and none was found (python3 is ${seen})." \
        "Install python$wanted, or name one: make setup PYTHON=/path/to/python$wanted"
    found=$(describe "$python")
    say "no python$wanted here, so $venv is made with Python ${found%% *} ($python), which works too." \
        "To choose another: make distclean setup PYTHON=/path/to/python$wanted"
}

if describe "$in_venv" >/dev/null; then
    at_least_wanted "$in_venv" || stop "$venv has an older Python than $wanted: remove it and run make again."
else
    choose_python
    say "making $venv with $python"
    # --clear: what is there, if anything, does not run.
    "$python" -m venv --clear "$venv" || stop "no environment could be made with $python -m venv (see above)."
fi
pip --version >/dev/null 2>&1 || "$in_venv" -m ensurepip >/dev/null 2>&1 \
    || stop "$venv has no pip, and Python's ensurepip is missing (Debian: apt install python3-venv). Then: make distclean setup"

if [ "$mcore" = none ]; then
    say "installing what builds the documentation into $venv"
    pip install -qq -e '.[docs]' || stop "$venv is not complete (see above); run make again once that is solved."
    exit
fi

# --- which torch -------------------------------------------------------------------------------

# What pip would install, "cpu" or "gpu", without fetching it: a build for GPUs has a local version
# such as +cu130, or (PyPI's on Linux) requires NVIDIA's packages. Fails where pip finds none.
build_of_torch() {
    pip install -qq --dry-run --no-deps --ignore-installed --report - "$@" "$torch" 2>/dev/null \
        | "$in_venv" -c '
import json, sys
metadata = json.load(sys.stdin)["install"][0]["metadata"]
local = metadata["version"].partition("+")[2]
needs_nvidia = any(line.startswith(("nvidia-", "cuda-")) for line in metadata.get("requires_dist", []))
gpu = local.startswith(("cu", "rocm", "xpu")) or (needs_nvidia and local != "cpu" and sys.platform == "linux")
print("gpu" if gpu else "cpu")' 2>/dev/null
}

# pip's own choice first: it follows what this machine is set up with and asks no new host. Only
# where that is a GPU build is TORCH_INDEX asked, briefly: it may be out of reach. An index found
# that way is added to pip's own, where its 2.13.0+cpu wins over a plain 2.13.0 by version order.
install_torch() {
    # The first pip that reads a wheel's metadata without fetching the wheel; older ones would
    # download all of torch only to look at it.
    pip install -qq 'pip>=23.2'
    build=$(build_of_torch) || build=none
    if [ "$build" != cpu ] && [ -n "$torch_index" ]; then
        found=$(build_of_torch --extra-index-url "$torch_index" --timeout 10 --retries 0) || found=none
        if [ "$found" = cpu ]; then
            build=cpu
            set -- --extra-index-url "$torch_index"
        fi
    fi
    if [ "$build" = gpu ]; then
        say "pip finds no CPU build of $torch here${torch_index:+ ($torch_index has none or can't be reached)}:" \
            "it would download a build for GPUs, about 3 GB (5 GB on disk)."
        if [ "${ALLOW_CUDA_TORCH:-}" != 1 ]; then
            say "The tests and the demo need the CPU only, so this stops here. Choose one of:"
            say "  make setup TORCH_INDEX=URL               an index with CPU wheels that this machine can reach"
            say "  make setup TORCH=/path/to/torch-cpu.whl  a wheel you have"
            say "  make setup ALLOW_CUDA_TORCH=1            the GPU build after all"
            say "  $in_venv -m pip install ...       a torch of your own; then run make again"
            exit 1
        fi
        say "installing it into $venv: minutes, fewer where pip has it in its cache"
    else
        say "installing $torch into $venv (about 200 MB)"
    fi
    pip install -qq "$@" "$torch" || stop "torch could not be installed (see above)."
}

"$in_venv" -c 'import torch' 2>/dev/null || install_torch

# --- the rest ----------------------------------------------------------------------------------

# Naming the torch that is there keeps pip from replacing it with another build.
have=$("$in_venv" -c 'from importlib.metadata import version; print(version("torch"))')
say "installing megapg and Megatron-core $mcore into $venv, next to torch $have"
pip install -qq -e '.[dev,megatron]' "megatron-core==$mcore" "torch==$have" \
    || stop "$venv is not complete (see above); run make again once that is solved."

# --- the old Megatron-core ---------------------------------------------------------------------

# Some tests run on it, in processes that have it in PYTHONPATH: two can't be installed in one
# place. Its wheel is for Python 3.11; what is compiled in it is for data sets, so any Python does.
if [ -n "$old" ] && [ ! -d "$venv/cores/$old" ]; then
    say "unpacking Megatron-core $old into $venv/cores"
    rm -rf "$venv/cores/unpacking"
    if pip install -qq --no-deps --only-binary=:all: --python-version 3.11 \
        --target "$venv/cores/unpacking" "megatron-core==$old"; then
        mv "$venv/cores/unpacking" "$venv/cores/$old"
    else
        say "that failed (see above); all works without it, but tests/bridge/test_old_core.py"
    fi
fi
