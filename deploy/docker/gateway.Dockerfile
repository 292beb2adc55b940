# The gateway: no torch, no transformers, no GPU.
#   docker build -f deploy/docker/gateway.Dockerfile -t chiasm-gateway .
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY chiasm chiasm
COPY gateway gateway
RUN python -m venv /opt/chiasm \
    && /opt/chiasm/bin/pip install --no-cache-dir -c constraints.txt '.[gateway,kubernetes]'

FROM python:3.11-slim
RUN useradd --system --uid 10001 --no-create-home chiasm
COPY --from=build /opt/chiasm /opt/chiasm
ENV PATH=/opt/chiasm/bin:$PATH PYTHONUNBUFFERED=1 CHIASM_HOST=0.0.0.0
USER 10001
EXPOSE 8000
# Exec form: SIGTERM reaches the service itself, which then drains.
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--model", "demo"]
