# Tandem on vLLM's own image, which has matching builds of CUDA, torch and vLLM. From the repository's root:
#
#   docker build -f ops/image/gpu.Dockerfile -t tandem:gpu .
#
# VLLM is a tag of vllm/vllm-openai; the tested releases are listed in backends/vllm/compat.py.
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends tini && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --uid 10001 tandem
WORKDIR /src
COPY . .
# Everything that the image has keeps its version: pip fails instead of replacing torch or vLLM.
RUN python3 -m pip list --format=freeze > /tmp/of-the-image.txt && \
    python3 -m pip install --no-cache-dir -c /tmp/of-the-image.txt ".[vllm,embeddings]" && \
    python3 -m pip check && \
    rm -rf /src/* /tmp/of-the-image.txt
USER 10001
ENV HOME=/home/tandem VLLM_NO_USAGE_STATS=1
WORKDIR /home/tandem
EXPOSE 8000 8001
# As in cpu.Dockerfile.
ENTRYPOINT ["tini", "--", "tandem"]
# --open: who reaches the published port is served; with tenants in the configuration, only with a key.
CMD ["serve", "/etc/tandem/tandem.yaml", "--host", "0.0.0.0", "--open"]
HEALTHCHECK --start-period=20m --interval=10s --timeout=5s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
