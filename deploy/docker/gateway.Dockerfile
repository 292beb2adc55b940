# The gateway: no torch, no transformers, no GPU. `make images` builds all three.
ARG PYTHON=python:3.11-slim-bookworm
FROM ${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY chiasm chiasm
COPY gateway gateway
RUN python -m venv /opt/chiasm \
    && /opt/chiasm/bin/pip install --no-cache-dir -c constraints.txt '.[gateway,kubernetes]'
# What is inside and of which version, for whoever makes a bill of materials.
RUN /opt/chiasm/bin/pip inspect > /opt/chiasm/packages.json \
    && /opt/chiasm/bin/python -m gateway --version

FROM ${PYTHON}
LABEL org.opencontainers.image.title="chiasm-gateway" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home chiasm
COPY --from=build /opt/chiasm /opt/chiasm
ENV PATH=/opt/chiasm/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 CHIASM_HOST=0.0.0.0 CHIASM_PORT=8000
USER 10001
# The root may be read-only; what is written goes to /tmp.
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=20s --timeout=10s --start-period=2m --retries=3 \
    CMD ["python", "-I", "-m", "chiasm.probe", "gateway"]
# Exec form: SIGTERM reaches the service itself, which then drains.
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--model", "demo"]
