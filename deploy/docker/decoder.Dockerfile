# The decoder. Runs on CPU as built; `make images` builds all three, `make images GPU=1` for GPUs:
# torch with CUDA, and a C compiler, which Triton needs for a few lines of its own at each start.
ARG PYTHON=python:3.11-slim-bookworm
ARG PYTHON_BUILD=${PYTHON}
FROM ${PYTHON_BUILD} AS build
ARG TORCH_INDEX_URL=
ARG EXTRAS=decoder
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY chiasm chiasm
COPY decoder_svc decoder_svc
# torch first and by itself, so that the index chosen for it decides the build.
RUN python -m venv /opt/chiasm \
    && /opt/chiasm/bin/pip install --no-cache-dir \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep -m1 '^torch==' constraints.txt)" \
    && /opt/chiasm/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"
# flashinfer's kernels, built ahead for these GPUs ("8.0 9.0a"): the build stage then needs nvcc and
# a C++ compiler, so PYTHON_BUILD is an image with CUDA's toolkit and a Python at the same path.
ARG FLASHINFER_CUDA_ARCH_LIST=
RUN if [ -n "$FLASHINFER_CUDA_ARCH_LIST" ]; then \
        FLASHINFER_CUDA_ARCH_LIST="$FLASHINFER_CUDA_ARCH_LIST" FLASHINFER_WORKSPACE_BASE=/tmp \
        /opt/chiasm/bin/python -m decoder_svc.attention.prebuild; \
    fi
# What is inside and of which version, for whoever makes a bill of materials.
RUN /opt/chiasm/bin/pip inspect > /opt/chiasm/packages.json \
    && /opt/chiasm/bin/python -m decoder_svc --version

FROM ${PYTHON}
ARG RUNTIME_PACKAGES=
LABEL org.opencontainers.image.title="chiasm-decoder" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home chiasm
RUN if [ -n "$RUNTIME_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $RUNTIME_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/chiasm /opt/chiasm
ENV PATH=/opt/chiasm/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 CHIASM_HOST=0.0.0.0 CHIASM_PORT=50051
# Peers must be able to dial it: set CHIASM_ADVERTISE_HOST to the address of the pod or host.
USER 10001
# The root may be read-only; what is written goes to /tmp.
WORKDIR /tmp
EXPOSE 50051
HEALTHCHECK --interval=20s --timeout=10s --start-period=1h --retries=3 \
    CMD ["python", "-I", "-m", "chiasm.probe", "decoder"]
# Exec form: SIGTERM reaches the service itself, which then drains.
ENTRYPOINT ["python", "-m", "decoder_svc"]
CMD ["--model", "demo"]
