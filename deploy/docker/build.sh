#!/usr/bin/env bash
# Builds REPO-gateway, REPO-encoder and REPO-decoder of TAG. `make images` calls it.
#
#   TORCH_INDEX_URL  an index with the builds of torch that you want; empty = pip's own
#   GPU=1            encoder and decoder for GPUs: with nixl, flashinfer, and a C compiler for Triton
#   CUDA_BASE        for GPU=1: an image with CUDA's toolkit, a C++ compiler and the Python that
#                    deploy/docker/*.Dockerfile start from, at the same path; flashinfer's kernels are
#                    then built ahead for CUDA_ARCHES; without it the decoder's image has no
#                    compiler for them and cannot run prompts on a GPU
#   PUSH=1           push each image as well
set -euo pipefail
cd "$(dirname "$0")/../.."

docker=${DOCKER:-docker}
repo=${REPO:?set REPO, such as registry.example.com/chiasm}
tag=${TAG:-$(sed -n 's/^__version__ = "\(.*\)"/\1/p' chiasm/__init__.py)}

for role in gateway encoder decoder; do
    arguments=()
    if [ "$role" != gateway ]; then
        arguments+=(--build-arg "TORCH_INDEX_URL=${TORCH_INDEX_URL:-}")
        if [ "${GPU:-}" = 1 ]; then
            extras=$role,nixl
            if [ "$role" = decoder ]; then
                extras+=,flashinfer
                if [ -n "${CUDA_BASE:-}" ]; then
                    arguments+=(--build-arg "PYTHON_BUILD=$CUDA_BASE")
                    arguments+=(--build-arg "FLASHINFER_CUDA_ARCH_LIST=${CUDA_ARCHES:-8.0 9.0a}")
                fi
            fi
            arguments+=(--build-arg "EXTRAS=$extras" --build-arg "RUNTIME_PACKAGES=gcc libc6-dev")
        fi
    fi
    "$docker" build -f "deploy/docker/$role.Dockerfile" -t "$repo-$role:$tag" "${arguments[@]}" .
    if [ "${PUSH:-}" = 1 ]; then
        "$docker" push "$repo-$role:$tag"
    fi
done
