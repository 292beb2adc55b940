# The encoder. Runs on CPU as built; for GPUs build with a CUDA index and the extras you need:
#   docker build -f deploy/docker/encoder.Dockerfile -t chiasm-encoder \
#     --build-arg TORCH_INDEX_URL=... --build-arg EXTRAS=encoder,nixl .
FROM python:3.11-slim AS build
ARG TORCH_INDEX_URL=
ARG EXTRAS=encoder
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY chiasm chiasm
COPY encoder_svc encoder_svc
# torch first and by itself, so that the index chosen for it decides the build.
RUN python -m venv /opt/chiasm \
    && /opt/chiasm/bin/pip install --no-cache-dir \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep -m1 '^torch==' constraints.txt)" \
    && /opt/chiasm/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

FROM python:3.11-slim
RUN useradd --system --uid 10001 --no-create-home chiasm
COPY --from=build /opt/chiasm /opt/chiasm
ENV PATH=/opt/chiasm/bin:$PATH PYTHONUNBUFFERED=1 CHIASM_HOST=0.0.0.0 CHIASM_PORT=50051
# Peers must be able to dial it: set CHIASM_ADVERTISE_HOST to the address of the pod or host.
USER 10001
EXPOSE 50051
# Exec form: SIGTERM reaches the service itself, which then drains.
ENTRYPOINT ["python", "-m", "encoder_svc"]
CMD ["--model", "demo"]
